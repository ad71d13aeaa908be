"""`Gate`: lets requests through while the memory they need is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts those inside; closing waits until the last has left, and whoever comes later waits outside.

    All calls are made on one event loop.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Inside for the block; waits while the gate is closed."""
        # Between being woken and running, somebody may have closed it again.
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    @property
    def is_open(self) -> bool:
        """Whether it lets anybody in."""
        return self._open.is_set()

    async def close(self) -> None:
        """Lets nobody in any more; returns once nobody is inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        """Lets everybody in who waits."""
        self._open.set()

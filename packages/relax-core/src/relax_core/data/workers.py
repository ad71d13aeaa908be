"""Processes that prepare chunks of rows side by side, and give them back in order.

Each has one chunk at a time: it waits for what it is sent, and what it sends is read in turn, so that no pipe
fills up on both sides. One that ends, for whatever reason, is known by its closed pipe.
"""

import logging
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from relax_core.data.examples import Example
from relax_core.data.prepare import Builder, Chunk, Prepared
from relax_core.data.problems import DataError

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Example)

_PATIENCE = 5.0


class WorkerError(DataError):
    """A worker has failed or gone; says which, how, and on which rows."""


class Workers(Generic[E]):
    """Worker processes with a builder each. Use it with `with`."""

    def __init__(self, builder: Builder[E], count: int) -> None:
        self._builder = builder
        self._count = count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        """Starts the processes.

        Raises:
            WorkerError: one has gone already.
        """
        with ExitStack() as stack:
            for number in range(1, self._count + 1):
                worker = _Worker(f"data worker {number}")
                stack.callback(worker.end)
                self._workers.append(worker)
            for worker in self._workers:
                worker.send(self._builder, "its start")
            # Pipes close before any process is waited for: all of them end together.
            for worker in self._workers:
                stack.callback(worker.connection.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prepare(self, chunks: Iterable[Chunk]) -> Iterator[Prepared[E]]:
        """What each chunk gives, in order.

        Raises:
            WorkerError: a worker has failed, or was ended from outside.
        """
        free, busy = deque(self._workers), deque[_Worker]()
        for chunk in chunks:
            if not free:
                free.append(busy.popleft())
                yield free[0].receive()
            worker = free.popleft()
            worker.send(chunk, f"rows {chunk[0].place} to {chunk[-1].place}")
            busy.append(worker)
        for worker in busy:
            yield worker.receive()


class _Worker:
    """One worker process.

    Attributes:
        connection: our end of its pipe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work = "its start"
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "relax_core.data.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def send(self, value: Any, work: str) -> None:
        self._work = work
        try:
            self.connection.send(value)
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> Prepared[Any]:
        try:
            found = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(found, str):
            logger.error("%s failed on %s:\n%s", self._name, self._work, found)
            raise WorkerError(f"{self._name} failed on {self._work}: {found.strip().splitlines()[-1]}")
        assert isinstance(found, Prepared)
        return found

    def end(self) -> None:
        """Waits for the process, which ends by itself once its pipe is closed; not for long."""
        self.connection.close()
        for stop in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_PATIENCE)
                return
            except subprocess.TimeoutExpired:
                stop()
        self._process.wait()

    def _gone(self) -> WorkerError:
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = f"{signal.Signals(-code).name}; memory was too little, if nobody sent it"
        return WorkerError(
            f"{self._name} (process {self._process.pid}) ended by {how}, on {self._work}: lower "
            "data.workers, or set it to 0 to prepare data in the run's own process"
        )

"""Where the time of a step goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up seconds by phase. A phase inside another one takes its time away from the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts a step.

        Args:
            clock: gives seconds; replaced in tests.
        """
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._start = self._mark = clock()

    @property
    def current(self) -> str | None:
        """The innermost running phase."""
        return self._stack[-1] if self._stack else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block for `name`."""
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def take(self) -> dict[str, float]:
        """Ends the step: seconds by phase, in order of first use, with `total` last; starts the next step.

        `total` is all time since the last `take`, so time outside of every phase shows as the difference.
        """
        self._book()
        seconds = {**self._seconds, "total": self._mark - self._start}
        self._seconds = {}
        self._start = self._mark
        return seconds

    def _book(self) -> None:
        now = self._clock()
        if self._stack:
            name = self._stack[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

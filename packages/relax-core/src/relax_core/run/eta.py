"""Time left until the end of a run."""

from collections.abc import Callable


class Eta:
    """Time left, from the pace of the steps done in this process."""

    def __init__(self, clock: Callable[[], float], *, total: int, done: int) -> None:
        """Starts to measure.

        Args:
            clock: gives seconds.
            total: steps of the run.
            done: steps done before this process began.
        """
        self._clock = clock
        self._total = total
        self._first = done
        self._start = clock()

    def after(self, step: int) -> float | None:
        """Seconds left once `step` is done; None while no step is done here."""
        if step <= self._first:
            self._start = self._clock()
            return None
        return (self._clock() - self._start) / (step - self._first) * (self._total - step)

"""Batches that a thread makes ready while the trainer works on the one before."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from relax_core.data.examples import Example
from relax_core.data.stream import ExampleStream

E = TypeVar("E", bound=Example)
Batch = TypeVar("Batch")


class BatchesAhead(Generic[E, Batch]):
    """The batches of a stream, in its order, whatever is made ahead.

    The state is that of the batches taken: what is ready but not taken comes again after a resume.

    Args:
        stream: gives examples; nobody else may draw from it.
        make: makes a batch of examples, and touches nothing else.
        count: examples of a batch.
        ahead: batches ready or in the making beside the one taken; with 0 each is made when it is due.
    """

    def __init__(
        self, stream: ExampleStream[E], make: Callable[[Sequence[E]], Batch], count: int, *, ahead: int
    ) -> None:
        self._stream = stream
        self._make = make
        self._count = count
        self._ahead = ahead
        self._state = stream.state_dict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._coming: deque[Future[tuple[Batch, dict[str, Any]]]] = deque()

    def take(self) -> Batch:
        """The next batch.

        Raises:
            Exception: whatever `make` raised for this batch.
        """
        if self._ahead == 0:
            batch, self._state = self._next()
            return batch
        while len(self._coming) <= self._ahead:
            self._coming.append(self._thread.submit(self._next))
        batch, self._state = self._coming.popleft().result()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The stream's, after the batch taken last."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved stream stood; called before the first batch is taken.

        Raises:
            DataError: the saved stream was another.
        """
        assert not self._coming, "batches have been taken"
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()

    def close(self) -> None:
        """Ends the thread; waits for the batch in the making. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _next(self) -> tuple[Batch, dict[str, Any]]:
        batch = self._make(self._stream.take(self._count))
        return batch, self._stream.state_dict()

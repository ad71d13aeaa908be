"""Work of a device that is launched as one where the device has graphs."""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


def _cuda_graph(work: Callable[[], T]) -> tuple[Callable[[], None], T]:
    graph = torch.cuda.CUDAGraph()
    # What other threads of this process do with the device meanwhile is their own affair.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


RECORDERS: dict[str, Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]] = {"cuda": _cuda_graph}
"""By type of device: records work without doing it; gives what does it, and what the work returned."""


class Recorded(Generic[T]):
    """Work that is done again and again on the same memory.

    Some hundred copies cost the host milliseconds to launch, a record of them one launch. The first call does
    the work as it is, the second records it; without a recorder for the device every call does it as it is.

    Args:
        device: that does the work.
        work: launches the same kernels on the same memory at every call, and neither waits for the device nor
            reads from it. What it returns lies in the same memory from the second call on.
    """

    def __init__(self, device: torch.device, work: Callable[[], T]) -> None:
        self._record = RECORDERS.get(device.type)
        self._work = work
        self._done = False
        self._recorded: tuple[Callable[[], None], T] | None = None

    def __call__(self) -> T:
        """Do it."""
        if self._record is None or not self._done:
            self._done = True
            return self._work()
        if self._recorded is None:
            try:
                self._recorded = self._record(self._work)
            except RuntimeError as error:
                log.warning("work on weights cannot be recorded and is launched piece by piece: %s", error)
                self._record = None
                return self._work()
        replay, result = self._recorded
        replay()
        return result

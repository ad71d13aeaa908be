"""Releasing memory while requests wait: SGLang asserts that there are none, and its scheduler dies of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_requests(scheduler: Any) -> Iterator[None]:
    """Hide the requests that wait; none of them holds any cache once the server was paused by retraction.

    Raises:
        RuntimeError: the server is not paused and requests wait, or some hold caches.
    """
    waiting = scheduler.waiting_queue
    if (waiting and not scheduler._engine_paused) or scheduler.running_batch.reqs:
        raise RuntimeError("requests are in flight; pause with the mode retract first")
    scheduler.waiting_queue = []
    try:
        yield
    finally:
        waiting.extend(scheduler.waiting_queue)
        scheduler.waiting_queue = waiting


def around_release(original: Any, updater: Any, request: Any) -> Any:
    """The barrier: nothing that is in flight can be scheduled on memory that is released."""
    if updater.scheduler is None:
        return original(updater, request)
    with no_requests(updater.scheduler):
        return original(updater, request)

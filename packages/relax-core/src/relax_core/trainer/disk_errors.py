"""What torch makes of a failed write, turned back into the error of the disk."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

_OF_TORCH = ("inline_container", "iostream error")
"""Words of torch's file writers about bytes that the disk did not take."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Inside the block, a write that the disk refused raises `OSError`, however torch reports it.

    torch's writers complain of a wrong position in their file, and its distributed ones wrap that in an
    exception of all ranks that is no `Exception`. Whatever was no fault of the disk passes unchanged.
    """
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        fault = _fault_of_disk(error)
        if fault is None:
            raise
        raise fault from error


def _fault_of_disk(error: BaseException) -> OSError | None:
    chain = list(_chain(error))
    for one in chain:
        if isinstance(one, OSError):
            return OSError(one.errno, one.strerror)
    if any(words in str(one) for one in chain for words in _OF_TORCH):
        return OSError(
            errno.EIO,
            "the disk is full, or a quota or a limit on file sizes is reached; make room, then go on with "
            "`relax-train --resume`",
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, on every rank."""
    while error is not None:
        yield error
        if isinstance(error, CheckpointException):
            for failure, _ in error.failures.values():
                yield from _chain(failure)
        error = error.__cause__ or error.__context__

"""Running out of memory, said as what to change."""

from collections.abc import Iterator
from contextlib import contextmanager


class OutOfMemoryError(ValueError):
    """A batch or the model is too large for the memory of the device or the machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no more: CUDA's and the NPU's say so in words, as errors of several kinds."""
    if isinstance(error, MemoryError):
        return True
    # The host's allocator speaks of what it cannot allocate.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the errors of every allocator, which are of several kinds, into one.

    Raises:
        OutOfMemoryError: memory was asked for that is not there.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = str(error)
        reason = text.splitlines()[0] if text else "the machine gave no more"
        raise OutOfMemoryError(
            f"out of memory: {reason}. Lower trainer.micro_batch_tokens or rollout.max_batch_size, or set "
            "trainer.recompute to full"
        ) from error

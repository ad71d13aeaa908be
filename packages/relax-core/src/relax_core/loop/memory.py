"""Running out of memory, said as what to change."""

from collections.abc import Iterator
from contextlib import contextmanager


class OutOfMemoryError(ValueError):
    """A batch or the model is too large for the memory of the device or the machine."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the errors of every allocator, which are of several kinds, into one.

    Raises:
        OutOfMemoryError: memory was asked for that is not there.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        # CUDA's and the NPU's allocators speak of "out of memory", the host's of what it cannot allocate.
        if not isinstance(error, MemoryError) and not any(
            words in text.lower() for words in ("out of memory", "can't allocate memory")
        ):
            raise
        reason = text.splitlines()[0] if text else "the machine gave no more"
        raise OutOfMemoryError(
            f"out of memory: {reason}. Lower trainer.micro_batch_tokens or rollout.max_batch_size, or set "
            "trainer.recompute to full"
        ) from error

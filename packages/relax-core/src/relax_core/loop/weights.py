"""Carries the trainer's weights to the engine as one transaction, and proves that they arrived."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

import torch
from relax_rollout import RolloutEngine, TransferError, tensor_digest
from torch import Tensor

from relax_core.loop.kept import KeptWeights
from relax_core.run.trace import span

_log = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20
ATTEMPTS = 3
"""Of an update whose tensors are lost on their way."""


class WeightMismatchError(RuntimeError):
    """The engine serves other weights than the trainer sent; the text names the tensors."""


async def update_engine(
    engine: RolloutEngine,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    kept: KeptWeights | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Streams Hugging Face tensors into `engine`, which serves them as `version` once all have arrived.

    The engine's own digest of every weight it serves is compared with the digest of what was sent, cast
    to the dtype in which the engine announced to serve that weight; that of a weight which it keeps, with
    the digest of the checkpoint's.

    Args:
        engine: gets them.
        tensors: all weights but the kept ones.
        version: the new one.
        kept: what the engine has from its checkpoint and keeps.
        bucket_bytes: of tensors that travel together.

    Returns:
        Number of tensors compared.

    Raises:
        WeightMismatchError: a digest differs.
        WeightUpdateError: the engine refused a tensor; the old version keeps serving.
        TransferError: tensors were lost on their way; `tensors` has come to its end all the same, as other
            ranks may take part in it.
    """
    stream = iter(tensors)
    try:
        return await _update(engine, stream, version, kept, bucket_bytes)
    except TransferError:
        for _ in stream:
            pass
        raise


async def retried(update: Callable[[], Awaitable[int]], version: int, attempts: int = ATTEMPTS) -> int:
    """What `update` returns, made again where tensors were lost on their way.

    Raises:
        TransferError: that happened in every attempt.
    """
    for attempt in range(1, attempts):
        try:
            return await update()
        except TransferError as error:
            _log.warning("update to version %d, attempt %d of %d: %s", version, attempt, attempts, error)
    return await update()


async def _update(
    engine: RolloutEngine,
    tensors: Iterator[tuple[str, Tensor]],
    version: int,
    kept: KeptWeights | None,
    bucket_bytes: int,
) -> int:
    row = "weight update"
    with span("begin", row, version=version):
        dtypes = await engine.begin_update(version, kept.names if kept else ())
    expected = kept.digests(dtypes) if kept else {}
    for bucket in buckets(tensors, bucket_bytes):
        with span("load", row, tensors=len(bucket), bytes=sum(tensor.nbytes for tensor in bucket.values())):
            await engine.load(bucket)
        expected |= {
            name: tensor_digest(tensor.to(getattr(torch, dtypes[name])))
            for name, tensor in bucket.items()
            if name in dtypes
        }
    with span("end", row):
        serving = await engine.end_update()
    return refuse_mismatch(serving, expected, version)


def refuse_mismatch(serving: Mapping[str, str], expected: Mapping[str, str], version: int) -> int:
    """Compares the digests of what an engine serves with those of what was sent; how many there are.

    Raises:
        WeightMismatchError: a digest differs.
    """
    wrong = sorted(name for name, digest in serving.items() if expected.get(name) != digest)
    if wrong:
        raise WeightMismatchError(
            f"after the update to version {version} the engine serves other values than the trainer sent for "
            f"{len(wrong)} of {len(serving)} tensors: {', '.join(wrong[:8])}"
        )
    return len(serving)


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Groups tensors, in order, into buckets of at most `limit` bytes (a larger tensor goes alone)."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket

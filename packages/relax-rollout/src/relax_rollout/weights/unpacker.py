"""Packed buckets for an engine that loads tensors of its own process."""

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from relax_rollout.digest import tensor_digests
from relax_rollout.engine import RolloutEngine, TransferError
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSource, Meeting
from relax_rollout.weights.bucket import Bucket, views, wrong_names
from relax_rollout.weights.files import FileSource
from relax_rollout.weights.ipc import IpcReceiver
from relax_rollout.weights.probe import sees
from relax_rollout.weights.receiver import Source


class Unpacker:
    """See :class:`relax_rollout.PackedLoading`: an engine of this process with it.

    Args:
        engine: loads the tensors.
        device: where they are opened.
    """

    receivers = 1

    def __init__(self, engine: RolloutEngine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._opened = IpcReceiver()
        self._group: BroadcastGroup | None = None

    async def sees(self, handles: Sequence[str]) -> bool:
        """See :class:`relax_rollout.PackedLoading`."""
        return await asyncio.to_thread(sees, handles[0], self._device)

    async def connect(self, meeting: Meeting, first_rank: int) -> None:
        """See :class:`relax_rollout.PackedLoading`."""
        try:
            self._group = await asyncio.to_thread(meeting.join, first_rank)
        except RuntimeError as error:
            raise TransferError(f"the group for weights did not come together: {error}") from error

    async def load_packed(self, parts: Sequence[Bucket]) -> None:
        """See :class:`relax_rollout.PackedLoading`."""
        bucket = parts[0]
        tensors = await asyncio.to_thread(self._fetch, bucket)
        wrong = wrong_names(bucket.entries, await asyncio.to_thread(tensor_digests, tensors))
        if wrong:
            raise TransferError(f"other bytes than were sent arrived for {', '.join(wrong[:8])}")
        await self._engine.load(tensors)

    def _fetch(self, bucket: Bucket) -> dict[str, Tensor]:
        try:
            buffer = self._source(bucket).fetch(bucket.nbytes, self._device)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"a bucket of weights did not arrive: {error}") from error
        return dict(zip((e.name for e in bucket.entries), views(bucket.entries, buffer), strict=True))

    def _source(self, bucket: Bucket) -> Source:
        if bucket.file is not None:
            return FileSource(bucket.file)
        if bucket.handle is not None:
            return self._opened.source(bucket.handle)
        if self._group is None:
            raise ValueError("a broadcast was announced, and no group was joined")
        return BroadcastSource(self._group)

"""The sending end in a trainer's process where engines do not open its memory: broadcasts, or files."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from relax_rollout.digest import tensor_digests
from relax_rollout.engine import TransferError
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSender, Meeting
from relax_rollout.weights.bucket import Bucket, pack, plan, torch_dtype
from relax_rollout.weights.files import BucketFiles

SendingPath = Literal["broadcast", "disk"]


class WeightSender:
    """Packs the buckets of one update after the other.

    Args:
        path: "broadcast" sends them to a group, "disk" writes files.
        folder: of "disk"; every receiver sees it under this name.
    """

    def __init__(self, path: SendingPath, *, folder: str | Path | None = None) -> None:
        self._path = path
        self._folder = folder
        self._files: BucketFiles | None = None
        self._group: BroadcastGroup | None = None
        self._sender: BroadcastSender | None = None
        self._waiting: tuple[Mapping[str, Tensor], Bucket] | None = None

    def begin(self) -> None:
        """A new update begins; what is left of the last one is given up."""
        if self._path == "disk":
            if self._files is not None:
                self._files.close()
            assert self._folder is not None, "the path disk has a folder"
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            self._files = BucketFiles(self._folder)

    def offer(self, host: str, size: int, backend: str, wait_s: float) -> Meeting:
        """Open the store of a new group of `size` processes, of which this one is the first."""
        name = f"relax-{secrets.token_hex(4)}"
        self._group = BroadcastGroup((host, 0), 0, size, backend, wait_s, name)
        return Meeting(host, self._group.port, size, backend, wait_s, name)

    def meet(self, device: torch.device) -> None:
        """Wait for the others of the group that was offered.

        Args:
            device: of the buckets; those of gloo are in the host's memory.

        Raises:
            TransferError: they did not come.
        """
        assert self._group is not None, "offer comes first"
        try:
            self._group.join()
        except RuntimeError as error:
            raise TransferError(f"the group for weights did not come together: {error}") from error
        self._sender = BroadcastSender(self._group, device)

    def pack(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> Bucket:
        """Pack some tensors, each in the dtype in which the engines serve it.

        A bucket of "broadcast" waits for :meth:`send`, and until then its tensors stay as they are.

        Args:
            tensors: by name.
            dtypes: of the engines' weights, by name; a name without one travels as it is.
        """
        cast = {name: t.to(torch_dtype(dtypes[name])) if name in dtypes else t for name, t in tensors.items()}
        entries, nbytes = plan(cast, tensor_digests(cast))
        if self._path == "disk":
            assert self._files is not None, "begin comes first"
            path, room = self._files.create(nbytes)
            pack(cast, entries, room)
            return Bucket(tuple(entries), nbytes, file=path)
        bucket = Bucket(tuple(entries), nbytes)
        self._waiting = cast, bucket
        return bucket

    def send(self) -> None:
        """Begin to broadcast the bucket that was packed last.

        Raises:
            TransferError: a receiver is gone, or was too late.
        """
        assert self._sender is not None, "meet comes first"
        assert self._waiting is not None, "pack comes first"
        (tensors, bucket), self._waiting = self._waiting, None
        try:
            self._sender.send(tensors, bucket.entries)
        except RuntimeError as error:
            raise TransferError(f"a bucket did not reach every engine: {error}") from error

    def finish(self) -> None:
        """Wait until every broadcast has arrived.

        Raises:
            TransferError: see :meth:`send`.
        """
        try:
            if self._sender is not None:
                self._sender.finish()
        except RuntimeError as error:
            raise TransferError(f"a bucket did not reach every engine: {error}") from error

    def close(self) -> None:
        """Give everything up."""
        if self._files is not None:
            self._files.close()

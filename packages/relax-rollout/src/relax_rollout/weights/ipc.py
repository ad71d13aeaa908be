"""The path by shared memory: memory of another process on the same device, opened and not copied.

A host counts as a device: there a buffer is an anonymous file, which goes when its last user ends.
"""

import base64
import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from relax_rollout.weights.bucket import Bucket, Entry, bucket_bytes, pack, plan, torch_dtype

MEMORY_NAME = "relax-weights"


class IpcSender:
    """Gives out buckets as handles to device memory; what it gave out stays until :meth:`release`.

    Args:
        lent: tensors whose memory stays where it is for as long as the receiver lives, for example a
            trainer's parameter buffers. Contiguous views of it are opened in place; all else is packed.
    """

    def __init__(self, lent: Iterable[Tensor] = ()) -> None:
        self._lent = {t.untyped_storage().data_ptr(): _whole(t) for t in lent}
        self._handles: dict[int, str] = {}
        self._free: list[Tensor] = []
        self._used: list[Tensor] = []
        self._files: list[int] = []

    def place(self, tensors: Mapping[str, Tensor]) -> list[tuple[list[Entry], Tensor]]:
        """The tensors in memory that has a handle: by lent buffer those that lie in it, and the rest packed.

        Returns:
            entries and their memory, which the device may still be writing.
        """
        lent: dict[int, list[Entry]] = {}
        rest: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            at = tensor.untyped_storage().data_ptr()
            if at in self._lent and tensor.is_contiguous():
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                offset = int(tensor.storage_offset()) * tensor.element_size()
                lent.setdefault(at, []).append(Entry(name, dtype, shape, offset, None))
            else:
                rest[name] = tensor
        found = [(entries, self._lent[at]) for at, entries in lent.items()]
        if rest:
            entries, nbytes = plan(rest, {})
            buffer = self._take(nbytes, next(iter(rest.values())).device)
            pack(rest, entries, buffer)
            found.append((entries, buffer))
        return found

    def buckets(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> list[Bucket]:
        """The tensors as buckets; lent ones must not change until the update has ended.

        Returns:
            buckets that the device has written.
        """
        placed = self.place(tensors)
        finish(next(iter(tensors.values())).device)
        return [self.bucket(entries, buffer).with_digests(digests) for entries, buffer in placed]

    def bucket(self, entries: Iterable[Entry], buffer: Tensor) -> Bucket:
        """What :meth:`place` gave, for a message."""
        listed = tuple(entries)
        return Bucket(listed, bucket_bytes(listed), handle=self._handle(buffer))

    @property
    def lasts(self) -> bool:
        """Whether what was given out since the last :meth:`release` stays as it is until the next one.

        Lent memory changes when its owner likes, and that of an accelerator is wanted for other things.
        """
        return all(buffer.device.type == "cpu" for buffer in self._used) and not self._lent

    def release(self) -> None:
        """The update has ended: its buffers may be written anew."""
        self._free += self._used
        self._used = []

    def _take(self, nbytes: int, device: torch.device) -> Tensor:
        """A buffer of at least this size; one of an earlier update if there is one, whose handle is known."""
        for place, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes and buffer.device == device:
                self._used.append(self._free.pop(place))
                return buffer
        room = torch.empty(nbytes, dtype=torch.uint8, device=device) if device.type != "cpu" else None
        self._used.append(self._of_the_host(nbytes) if room is None else room)
        return self._used[-1]

    def _of_the_host(self, nbytes: int) -> Tensor:
        if not hasattr(os, "memfd_create"):
            raise ValueError("only Linux shares memory of a host by handles; elsewhere weights go by files")
        descriptor = os.memfd_create(MEMORY_NAME)
        self._files.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give up the memory; whoever has opened some keeps it."""
        while self._files:
            os.close(self._files.pop())
        self._free, self._used = [], []
        self._handles.clear()

    def _handle(self, buffer: Tensor) -> str:
        at = buffer.data_ptr()
        if at not in self._handles:
            self._handles[at] = handle_of(buffer)
        return self._handles[at]


def finish(device: torch.device) -> None:
    """Wait for what was queued on a device."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class IpcReceiver:
    """Opens what an :class:`IpcSender` gave out; what was opened stays open, as opening takes a while."""

    def __init__(self) -> None:
        self._opened: dict[str, Tensor] = {}

    def source(self, handle: str) -> "IpcSource":
        """Of a bucket."""
        return IpcSource(self, handle)

    def open(self, handle: str, device: torch.device) -> Tensor:
        """The memory of a handle, uint8.

        Raises:
            ValueError: it is not there any more.
        """
        if handle not in self._opened:
            try:
                self._opened[handle] = open_handle(handle, device)
            except (RuntimeError, OSError) as error:
                raise ValueError(
                    f"memory of the sender cannot be opened: {error}; sender and receiver must be on the "
                    "same device of one host"
                ) from error
        return self._opened[handle]


class IpcSource:
    """See :class:`relax_rollout.weights.receiver.Source`."""

    stays = True

    def __init__(self, receiver: IpcReceiver, handle: str) -> None:
        self._receiver, self._handle = receiver, handle

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """The memory itself, not a copy; it may be longer than the bucket.

        Raises:
            ValueError: see :meth:`IpcReceiver.open`.
        """
        return self._receiver.open(self._handle, device)


def handle_of(buffer: Tensor) -> str:
    """What another process needs to open a buffer, as JSON.

    Raises:
        ValueError: the tensor is in memory of this process alone.
    """
    if buffer.device.type == "cpu":
        path = buffer.untyped_storage().filename
        if path is None:
            raise ValueError(
                "this memory of the host is one process's own; only what is mapped from a file has a handle"
            )
        # A later memory may have the same path: who has opened this one must not take it for that.
        file = Path(path).stat().st_ino
        return json.dumps(
            {"rebuild": HOST, "path": path, "size": buffer.untyped_storage().nbytes(), "file": file}
        )
    reduce: Any = reductions.reduce_tensor
    rebuild, fields = reduce(buffer)
    kept = [field for field in fields if not isinstance(field, type)]
    shape, stride, offset, dtype, *rest = kept
    coded = [base64.b64encode(f).decode() if isinstance(f, bytes) else f for f in rest]
    return json.dumps(
        {
            "rebuild": rebuild.__name__,
            "tensor": [list(shape), list(stride), offset, str(dtype).removeprefix("torch.")],
            "memory": coded,
            "bytes": [isinstance(field, bytes) for field in rest],
        }
    )


HOST = "host memory"
REBUILDERS = {"cuda": "rebuild_cuda_tensor", "npu": "rebuild_npu_tensor", "cpu": HOST}


def open_handle(handle: str, device: torch.device) -> Tensor:
    """The buffer of a handle, on a device that may have another number here than at the sender.

    Raises:
        ValueError: it is no handle of this kind of device.
        RuntimeError: the device cannot open it.
        OSError: the process that it is of has ended, or is another user's.
    """
    fields = json.loads(handle)
    if fields["rebuild"] not in REBUILDERS.values():
        raise ValueError(f"{fields['rebuild']!r} opens no device memory; known: {list(REBUILDERS.values())}")
    if fields["rebuild"] != REBUILDERS.get(device.type):
        raise ValueError(f"{fields['rebuild']!r} gives no memory of {device}")
    if fields["rebuild"] == HOST:
        return _host_memory(fields["path"], fields["size"], fields["file"])
    npu = fields["rebuild"] == REBUILDERS["npu"]
    module: Any = import_module("torch_npu.multiprocessing.reductions") if npu else reductions
    rebuild: Any = getattr(module, fields["rebuild"])
    shape, stride, offset, dtype = fields["tensor"]
    memory = [
        base64.b64decode(field) if coded else field
        for field, coded in zip(fields["memory"], fields["bytes"], strict=True)
    ]
    # A rank of several says "cuda" and means its own.
    memory[0] = torch.accelerator.current_device_index() if device.index is None else device.index
    storage: Any = torch.storage.TypedStorage
    opened: Tensor = rebuild(
        Tensor, torch.Size(shape), tuple(stride), offset, storage, torch_dtype(dtype), *memory
    )
    return opened


def _host_memory(path: str, size: int, file: int) -> Tensor:
    # The number of a process that has ended may be another's by now, and so may its files.
    own = str(Path(path).readlink()).startswith(f"/memfd:{MEMORY_NAME}")
    if not own or Path(path).stat().st_ino != file:
        raise OSError(f"{path} is not the sender's memory any more")
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor lies in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

"""A bucket of tensors as one run of bytes, and the list that says what is where in it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple of it, so that any dtype may be viewed in place."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a whole tensor a rank's share is.

    Args:
        axis: along which the whole was cut.
        ranges: (start, size) along it, in the order in which they lie in the share.
        shape: of the whole.
    """

    axis: int
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        joined: list[tuple[int, int]] = []
        for start, size in self.ranges:
            if joined and start == sum(joined[-1]):
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((start, size))
        object.__setattr__(self, "ranges", tuple(joined))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket.

    Args:
        name: Hugging Face name.
        dtype: as "bfloat16".
        shape: of the tensor.
        offset: first byte in the bucket.
        digest: :func:`relax_rollout.tensor_digest` of what was sent, or None where it is not computed.
            Entries that differ in it alone are equal: the same tensor at the same place.
        share: which part of the whole it is; None where it is the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    digest: str | None = field(compare=False)
    share: Share | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.shape if self.share is None else self.share.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * torch_dtype(self.dtype).itemsize

    def to_json(self) -> list[Any]:
        """For a message."""
        share = self.share and [self.share.axis, self.share.ranges, self.share.shape]
        return [self.name, self.dtype, list(self.shape), self.offset, self.digest, share]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "Entry":
        """Of a message."""
        name, dtype, shape, offset, digest, told = fields
        share = told and Share(told[0], tuple((start, size) for start, size in told[1]), tuple(told[2]))
        return cls(name, dtype, tuple(shape), offset, digest, share)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called so.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch; give for example bfloat16 or float32")
    return dtype


def padded(nbytes: int) -> int:
    """Bytes that a tensor, or a bucket, takes up."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def bucket_bytes(entries: Sequence[Entry]) -> int:
    """Size of the bucket of these entries, the same at both ends."""
    return padded(max((entry.offset + entry.nbytes for entry in entries), default=0))


def plan(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> tuple[list[Entry], int]:
    """Where each tensor goes, and the bucket's size in bytes."""
    entries, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), offset, digests.get(name)))
        offset += padded(tensor.nbytes)
    return entries, bucket_bytes(entries)


def pack(tensors: Mapping[str, Tensor], entries: Sequence[Entry], buffer: Tensor) -> None:
    """Copy the tensors into their places of a uint8 buffer."""
    for entry, view in zip(entries, views(entries, buffer), strict=True):
        view.copy_(tensors[entry.name].detach())


def views(entries: Sequence[Entry], buffer: Tensor) -> list[Tensor]:
    """The tensors of a uint8 buffer, in place.

    Raises:
        ValueError: the buffer is shorter than the entries say.
    """
    found = []
    for entry in entries:
        end = entry.offset + entry.nbytes
        if end > buffer.numel():
            raise ValueError(f"{entry.name} ends at byte {end} of a bucket of {buffer.numel()} bytes")
        found.append(buffer[entry.offset : end].view(torch_dtype(entry.dtype)).view(entry.shape))
    return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that was packed, as its receivers are told of it.

    Args:
        entries: what is where in it.
        nbytes: of all of it.
        file: where it is, or None.
        handle: of the memory where it is, or None. Without either it travels by broadcast.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    file: str | None = None
    handle: str | None = None

    def only(self, names: Collection[str], renamed: Mapping[str, str]) -> "Bucket":
        """The same bytes, with some of its tensors alone, by other names where they have others."""
        kept = (
            replace(entry, name=renamed.get(entry.name, entry.name))
            for entry in self.entries
            if entry.name in names
        )
        return replace(self, entries=tuple(kept))

    def with_digests(self, digests: Mapping[str, str]) -> "Bucket":
        """The same with the digests of what was sent."""
        entries = (replace(entry, digest=digests.get(entry.name)) for entry in self.entries)
        return replace(self, entries=tuple(entries))

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        fields: dict[str, Any] = {"entries": [entry.to_json() for entry in self.entries]}
        where = {"nbytes": self.nbytes, "file": self.file, "handle": self.handle}
        return fields | {name: value for name, value in where.items() if value is not None}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Bucket":
        """Of a message."""
        entries = tuple(map(Entry.from_json, fields["entries"]))
        return cls(entries, fields["nbytes"], fields.get("file"), fields.get("handle"))

    @property
    def lasts(self) -> bool:
        """Whether it can be read again, also by others, until its sender drops it."""
        return self.file is not None or self.handle is not None


def wrong_names(entries: Iterable[Entry], received: Mapping[str, str]) -> list[str]:
    """Names whose digest at a receiver is not the sender's."""
    return [entry.name for entry in entries if received.get(entry.name) != entry.digest]

"""What an export moves, planned alike on every rank: tensors, buckets of them, the steps of a bucket."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from relax_bridge.model_map import ModelMap
from relax_bridge.placement import Placement
from relax_bridge.table import Entry
from relax_bridge.transforms import Shape

_ALIGN = 16
Index = tuple[slice | int, ...]


class Target(NamedTuple):
    """A Hugging Face tensor to export, and the (entry, part) pairs that its elements come from."""

    name: str
    shape: Shape
    dtype: torch.dtype
    origins: tuple[tuple[Entry, int], ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


class Move(NamedTuple):
    """A block of a rank's tensor and its place in a Hugging Face tensor.

    Attributes:
        rank: who has it.
        megatron: the entry it lies in.
        source: its place in the rank's tensor.
        target: its place in the Hugging Face tensor `name`.
        shape: its shape.
        dtype: its dtype on the way.
        size: its bytes on the way, rounded up so that every block begins aligned.
    """

    rank: int
    megatron: str
    source: Index
    name: str
    target: Index
    shape: Shape
    dtype: torch.dtype
    size: int

    @property
    def nbytes(self) -> int:
        """Its bytes, without what aligns the next."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Step:
    """The blocks of one exchange; `opens` are the tensors it begins with, `closes` ends a bucket."""

    opens: list[Target] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    closes: bool = False


def targets(table: ModelMap, dtype_of: Callable[[str], torch.dtype]) -> Iterator[Target]:
    """Every Hugging Face tensor of a table, in its order."""
    for _, group in groupby(table.entries, key=lambda e: e.hf if e.row.stacked else e.megatron):
        entries = tuple(group)
        for part, (name, shape) in enumerate(zip(entries[0].hf, entries[0].hf_shapes, strict=True)):
            yield Target(name, shape, dtype_of(name), tuple([(entry, part) for entry in entries]))


def steps(
    placement: Placement, wanted: Iterator[Target], *, bucket_bytes: int, travels: Callable[[int], bool]
) -> Iterator[Step]:
    """Buckets of at most `bucket_bytes` (a larger tensor goes alone), in exchanges of at most half of that.

    Args:
        placement: who has what.
        wanted: the tensors, in order.
        bucket_bytes: the size of a bucket.
        travels: whether what a rank has leaves it.
    """
    limit = max(_ALIGN, bucket_bytes // 2)
    step, filled, on_the_way = Step(), 0, 0
    for target in wanted:
        if filled and filled + target.nbytes > bucket_bytes:
            step.closes = True
            yield step
            step, filled, on_the_way = Step(), 0, 0
        filled += target.nbytes
        step.opens.append(target)
        for move in _moves(placement, target, limit):
            if travels(move.rank):
                if on_the_way and on_the_way + move.size > limit:
                    yield step
                    step, on_the_way = Step(), 0
                on_the_way += move.size
            step.moves.append(move)
    step.closes = True
    yield step


def _moves(placement: Placement, target: Target, limit: int) -> Iterator[Move]:
    for entry, part in target.origins:
        stack = () if entry.stack_index is None else (entry.stack_index,)
        for rank, cutting in placement.sources(entry):
            for piece in cutting.sends:
                if piece.part != part:
                    continue
                rows, tail = cutting.shape[0], cutting.shape[1:]
                here, there = piece.at, piece.start
                columns: tuple[tuple[slice, ...], tuple[slice, ...]] = ((), ())
                if cutting.axis:
                    columns = (slice(here, here + piece.size),), (slice(there, there + piece.size),)
                    here, there, tail = 0, 0, (piece.size,)
                else:
                    rows = piece.size
                width = prod(tail) * target.dtype.itemsize
                height = max(1, limit // max(1, width))
                for row in range(0, rows, height):
                    count = min(height, rows - row)
                    yield Move(
                        rank,
                        entry.megatron,
                        (slice(here + row, here + row + count), *columns[0]),
                        target.name,
                        (*stack, slice(there + row, there + row + count), *columns[1]),
                        (count, *tail),
                        target.dtype,
                        -(-count * width // _ALIGN) * _ALIGN,
                    )

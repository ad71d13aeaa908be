"""What an export moves, planned alike on every rank: tensors, buckets of them, the steps of a bucket."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from relax_bridge.model_map import ModelMap
from relax_bridge.placement import Cutting, Placement
from relax_bridge.table import Entry
from relax_bridge.transforms import Shape

_ALIGN = 16


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


class Block(NamedTuple):
    """Rows of a rank's tensor and their place in a Hugging Face tensor.

    Attributes:
        source: their place in the rank's tensor.
        target: their place in the Hugging Face tensor, without the axis of a stack.
        shape: their shape.
        dtype: their dtype on the way.
        nbytes: their bytes.
        size: the same, rounded up so that every block begins aligned.
    """

    source: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: Shape
    dtype: torch.dtype
    nbytes: int
    size: int


class Move(NamedTuple):
    """A block on its way.

    Attributes:
        rank: who has it.
        megatron: the entry it lies in.
        name: the Hugging Face tensor it belongs to.
        stack: the place along that tensor's first axis, where it stacks several entries.
        block: which rows.
    """

    rank: int
    megatron: str
    name: str
    stack: int | None
    block: Block

    @property
    def target(self) -> tuple[slice | int, ...]:
        """The block's place in the Hugging Face tensor."""
        return self.block.target if self.stack is None else (self.stack, *self.block.target)


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
    """Buckets of at most `bucket_bytes` (a larger tensor goes alone), in exchanges of at most a third of
    that: two of them and a bucket are less than two buckets.

    Args:
        placement: who has what.
        wanted: the tensors, in order.
        bucket_bytes: the size of a bucket.
        travels: whether what a rank has leaves it.
    """
    limit = max(_ALIGN, bucket_bytes // 3)
    moves = _Mover(placement, limit)
    step, filled, on_the_way = Step(), 0, 0
    for target in wanted:
        if filled and filled + target.nbytes > bucket_bytes:
            step.closes = True
            yield step
            step, filled, on_the_way = Step(), 0, 0
        filled += target.nbytes
        step.opens.append(target)
        for move in moves(target):
            if travels(move.rank):
                size = move.block.size
                if on_the_way and on_the_way + size > limit:
                    yield step
                    step, on_the_way = Step(), 0
                on_the_way += size
            step.moves.append(move)
    step.closes = True
    yield step


class _Mover:
    """The moves of targets; the blocks of a row's tensors are the same in every layer and expert."""

    def __init__(self, placement: Placement, limit: int) -> None:
        self._placement = placement
        self._limit = limit
        self._blocks: dict[tuple[int, int, torch.dtype], list[list[Block]]] = {}

    def __call__(self, target: Target) -> Iterator[Move]:
        for entry, part in target.origins:
            sources = self._placement.sources(entry)
            key = (id(entry.row), part, target.dtype)
            if key not in self._blocks:
                self._blocks[key] = [
                    list(_blocks(cut, part, target.dtype, self._limit)) for _, cut in sources
                ]
            for (rank, _), blocks in zip(sources, self._blocks[key], strict=True):
                for block in blocks:
                    yield Move(rank, entry.megatron, target.name, entry.stack_index, block)


def _blocks(cutting: Cutting, part: int, dtype: torch.dtype, limit: int) -> Iterator[Block]:
    """What a rank gives of a part, in blocks of at most `limit` bytes (and at least a row)."""
    for piece in cutting.sends:
        if piece.part != part:
            continue
        rows, tail = piece.size, cutting.shape[1:]
        here, there = piece.at, piece.start
        mine: tuple[slice, ...] = ()
        whole: tuple[slice, ...] = ()
        if cutting.axis:
            mine, whole = (slice(here, here + piece.size),), (slice(there, there + piece.size),)
            rows, tail, here, there = cutting.shape[0], (piece.size,), 0, 0
        width = prod(tail) * dtype.itemsize
        height = max(1, limit // max(1, width))
        for row in range(0, rows, height):
            count = min(height, rows - row)
            yield Block(
                (slice(here + row, here + row + count), *mine),
                (slice(there + row, there + row + count), *whole),
                (count, *tail),
                dtype,
                count * width,
                -(-count * width // _ALIGN) * _ALIGN,
            )

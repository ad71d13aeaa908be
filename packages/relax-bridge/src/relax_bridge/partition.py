"""How a Megatron tensor is cut over tensor-parallel ranks: per component, never as one block.

A partition is a pure function from (rank, ranks) to the rows (or columns) of the full tensor that the rank
holds, in the order in which it holds them. `shard` and `gather` follow from it and are inverse to each other:
gather([shard(x, r, n) for r in range(n)]) equals x bit for bit. A fused tensor (gate and up, or q, k, v, z,
b, a) is cut inside every component, and a rank holds its pieces in component order, so joining whole shards
end to end would scramble it; `gather` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from relax_bridge.errors import BridgeError


class Range(NamedTuple):
    """`size` rows (or columns) of the full tensor, from `start`."""

    start: int
    size: int


class Cut(NamedTuple):
    """A rank's share of an axis: ranges of the full tensor in local order, then `padding` rows of zeros."""

    ranges: tuple[Range, ...]
    padding: int = 0

    @property
    def size(self) -> int:
        """The length of the axis on the rank."""
        return sum(part.size for part in self.ranges) + self.padding


@runtime_checkable
class Partition(Protocol):
    """The placement of one Megatron tensor over tensor-parallel ranks."""

    @property
    def axis(self) -> int:
        """The axis that is cut."""
        ...

    def cut(self, size: int, rank: int, ranks: int) -> Cut:
        """What rank `rank` of `ranks` holds of an axis of `size`."""
        ...

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """The piece that rank `tp_rank` of `tp_size` holds."""
        ...

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks, in rank order."""
        ...

    def describe(self) -> str:
        """A short text for tables, for instance `0: gate, up`."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    @property
    def axis(self) -> int:
        """0: a replica is a cut that leaves the first axis whole."""
        return 0

    def cut(self, size: int, rank: int, ranks: int) -> Cut:
        """All of it."""
        check_rank(rank, ranks)
        return Cut((Range(0, size),))

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """Returns `full`."""
        check_rank(tp_rank, tp_size)
        return full

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns rank 0's copy.

        Raises:
            BridgeError: if the copies differ (a replica that drifted is a training fault).
        """
        for rank, other in enumerate(shards):
            if not torch.equal(_bits(other), _bits(shards[0])):
                raise BridgeError(f"replicas differ: rank {rank}'s copy is not rank 0's")
        return shards[0]

    def describe(self) -> str:
        """`replicated`."""
        return "replicated"


@dataclass(frozen=True)
class Component:
    """A run of `size` rows (or columns) that is cut on its own; a cut falls on multiples of `unit`.

    `unit` is the head dim for components made of heads, so that no head is cut in two.
    """

    name: str
    size: int
    unit: int = 1


class _CutAxis:
    """`shard` and `gather` of a partition that cuts the rows (or columns) `whole` along `axis`."""

    axis: int

    @property
    def whole(self) -> int:
        """The length of the axis in the full tensor."""
        raise NotImplementedError

    def cut(self, size: int, rank: int, ranks: int) -> Cut:
        """What rank `rank` of `ranks` holds of an axis of `size`."""
        raise NotImplementedError

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's piece: its part of every component, in component order.

        Raises:
            BridgeError: if a component does not divide, or `full` is not as long as the components.
        """
        cut = self.cut(full.shape[self.axis], tp_rank, tp_size)
        pieces = [full.narrow(self.axis, *part) for part in cut.ranges]
        if cut.padding:
            shape = list(full.shape)
            shape[self.axis] = cut.padding
            pieces.append(full.new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.axis)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, put together component by component.

        Raises:
            BridgeError: if a shard is not as long as the components say.
        """
        shape = list(shards[0].shape)
        shape[self.axis] = self.whole
        full = shards[0].new_empty(shape)
        for rank, shard in enumerate(shards):
            cut = self.cut(self.whole, rank, len(shards))
            if shard.shape[self.axis] != cut.size:
                raise BridgeError(
                    f"rank {rank}'s shard has {shard.shape[self.axis]} rows on axis {self.axis}; "
                    f"the table says {cut.size}"
                )
            at = 0
            for part in cut.ranges:
                full.narrow(self.axis, *part).copy_(shard.narrow(self.axis, at, part.size))
                at += part.size
        return full

    def _check(self, size: int, rank: int, ranks: int) -> None:
        check_rank(rank, ranks)
        if size != self.whole:
            raise BridgeError(f"axis {self.axis} has {size} rows; the table says {self.whole}")


@dataclass(frozen=True)
class Split(_CutAxis):
    """Cut along `axis`, each component on its own; sizes must divide by the number of ranks.

    With `pad_multiple` (the vocabulary) the one component is first padded with zero rows to a multiple of
    `pad_multiple * ranks`, and `gather` removes them.
    """

    axis: int
    components: tuple[Component, ...]
    pad_multiple: int | None = None

    def __post_init__(self) -> None:
        if self.pad_multiple is not None and len(self.components) != 1:
            raise BridgeError("only a split of one component can be padded")

    @property
    def whole(self) -> int:
        """The length of the axis in the full tensor."""
        return sum(part.size for part in self.components)

    def cut(self, size: int, rank: int, ranks: int) -> Cut:
        """The rank's part of every component; the last ranks' parts of a padded one may be padding.

        Raises:
            BridgeError: if a component does not divide, or `size` is not that of the components.
        """
        self._check(size, rank, ranks)
        if self.pad_multiple is not None:
            local = -(-size // (self.pad_multiple * ranks)) * self.pad_multiple
            held = max(0, min(local, size - rank * local))
            return Cut((Range(min(rank * local, size), held),), local - held)
        found, start = [], 0
        for part in self.components:
            local = self._local(part, ranks)
            found.append(Range(start + rank * local, local))
            start += part.size
        return Cut(tuple(found))

    def describe(self) -> str:
        """The axis and the components, `0: q, k, v`."""
        text = f"{self.axis}: " + ", ".join(part.name for part in self.components)
        return text + (" (padded)" if self.pad_multiple is not None else "")

    def _local(self, part: Component, ranks: int) -> int:
        units = part.size // part.unit
        if units % ranks:
            raise BridgeError(
                f"component {part.name!r} has {units} units of {part.unit}; "
                f"a tensor-parallel size of {ranks} does not divide them"
            )
        return part.size // ranks


@dataclass(frozen=True)
class GroupedSplit(_CutAxis):
    """Rows in `groups` blocks of [query heads; gate heads; key; value], each of `head_dim` rows a head.

    Up to one rank a group, a rank holds whole blocks. With more, n = ranks // groups ranks share a group:
    each holds its share of the group's query heads and gates, and an n-th of the rows of the key and of the
    value (the trainer gathers the features they make). Every row lies on one rank. `sides` is 2 with gates, 1
    without.
    """

    groups: int
    heads_per_group: int
    head_dim: int
    sides: int

    @property
    def axis(self) -> int:  # type: ignore[override]
        """0."""
        return 0

    @property
    def whole(self) -> int:
        """The rows of the full tensor."""
        return self.groups * self._block

    @property
    def _block(self) -> int:
        return (self.sides * self.heads_per_group + 2) * self.head_dim

    def cut(self, size: int, rank: int, ranks: int) -> Cut:
        """Whole blocks, or a share of one block's query and gate heads, of its key and of its value.

        Raises:
            BridgeError: neither number of groups and ranks divides the other, or a group's query heads or the
                rows of its key do not spread evenly over its ranks.
        """
        self._check(size, rank, ranks)
        if self.groups % ranks == 0:
            rows = self.whole // ranks
            return Cut((Range(rank * rows, rows),))
        sharing = ranks // self.groups
        if ranks % self.groups or self.heads_per_group % sharing or self.head_dim % sharing:
            raise BridgeError(
                f"{self.groups} groups of {self.heads_per_group} query heads cannot be spread over {ranks} "
                "tensor-parallel ranks: the number of ranks must divide the groups, or be a multiple of them "
                f"that gives every rank whole query heads and as many of a key's {self.head_dim} rows"
            )
        group, share = divmod(rank, sharing)
        side = self.heads_per_group * self.head_dim
        mine, base = side // sharing, group * self._block
        heads = tuple(Range(base + s * side + share * mine, mine) for s in range(self.sides))
        rows, keys = self.head_dim // sharing, base + self.sides * side
        shares = tuple(Range(keys + s * self.head_dim + share * rows, rows) for s in range(2))
        return Cut((*heads, *shares))

    def describe(self) -> str:
        """`0: groups of q, gate, k, v`."""
        return "0: groups of q, gate, k, v" if self.sides == 2 else "0: groups of q, k, v"


def check_rank(rank: int, ranks: int) -> None:
    """Raises `BridgeError` for a rank that the group does not have."""
    if not 0 <= rank < ranks:
        raise BridgeError(f"tensor-parallel rank {rank} is not in 0..{ranks - 1}")


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)

"""How a Megatron tensor is cut over tensor-parallel ranks: per component, never as one block.

`shard` and `gather` are pure and inverse to each other: gather([shard(x, r, n) for r in range(n)]) equals x
bit for bit. A fused tensor (gate and up, or q, k, v, z, b, a) is cut inside every component, and a rank holds
its pieces in component order, so joining whole shards end to end would scramble it; `gather` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from relax_bridge.errors import BridgeError


@runtime_checkable
class Partition(Protocol):
    """The placement of one Megatron tensor over tensor-parallel ranks."""

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

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """Returns `full`."""
        _check_rank(tp_rank, tp_size)
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


@dataclass(frozen=True)
class Split:
    """Cut along `axis`, each component on its own; sizes must divide by the number of ranks.

    With `pad_multiple` (the vocabulary) the one component is first padded with zero rows to a multiple of
    `pad_multiple * tp_size`, and `gather` removes them.
    """

    axis: int
    components: tuple[Component, ...]
    pad_multiple: int | None = None

    def __post_init__(self) -> None:
        if self.pad_multiple is not None and len(self.components) != 1:
            raise BridgeError("only a split of one component can be padded")

    def shard(self, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's piece: its part of every component, in component order.

        Raises:
            BridgeError: if a component does not divide, or `full` is not as long as the components.
        """
        _check_rank(tp_rank, tp_size)
        total = sum(part.size for part in self.components)
        if full.shape[self.axis] != total:
            raise BridgeError(f"axis {self.axis} has {full.shape[self.axis]} rows; the table says {total}")
        if self.pad_multiple is not None:
            return self._padded(full, tp_size).chunk(tp_size, dim=self.axis)[tp_rank]
        sizes = [self._local(part, tp_size) for part in self.components]
        pieces, start = [], 0
        for part, size in zip(self.components, sizes, strict=True):
            pieces.append(full.narrow(self.axis, start + tp_rank * size, size))
            start += part.size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.axis)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, put together component by component.

        Raises:
            BridgeError: if a shard is not as long as the components say.
        """
        tp_size = len(shards)
        if self.pad_multiple is not None:
            return torch.cat(list(shards), dim=self.axis).narrow(self.axis, 0, self.components[0].size)
        sizes = [self._local(part, tp_size) for part in self.components]
        for rank, shard in enumerate(shards):
            if shard.shape[self.axis] != sum(sizes):
                raise BridgeError(
                    f"rank {rank}'s shard has {shard.shape[self.axis]} rows on axis {self.axis}; "
                    f"the table says {sum(sizes)}"
                )
        split = [torch.split(shard, sizes, dim=self.axis) for shard in shards]
        return torch.cat([pieces[c] for c in range(len(sizes)) for pieces in split], dim=self.axis)

    def describe(self) -> str:
        """The axis and the components, `0: q, k, v`."""
        text = f"{self.axis}: " + ", ".join(part.name for part in self.components)
        return text + (" (padded)" if self.pad_multiple is not None else "")

    def _local(self, part: Component, tp_size: int) -> int:
        units = part.size // part.unit
        if units % tp_size:
            raise BridgeError(
                f"component {part.name!r} has {units} units of {part.unit}; "
                f"a tensor-parallel size of {tp_size} does not divide them"
            )
        return part.size // tp_size

    def _padded(self, full: Tensor, tp_size: int) -> Tensor:
        assert self.pad_multiple is not None
        short = -full.shape[self.axis] % (self.pad_multiple * tp_size)
        if not short:
            return full
        shape = list(full.shape)
        shape[self.axis] = short
        return torch.cat([full, full.new_zeros(shape)], dim=self.axis)


def _check_rank(tp_rank: int, tp_size: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise BridgeError(f"tensor-parallel rank {tp_rank} is not in 0..{tp_size - 1}")


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)

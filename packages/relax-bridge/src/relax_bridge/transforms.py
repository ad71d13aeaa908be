"""Named invertible transforms between Hugging Face tensors and one fused Megatron tensor.

A transform is an order of rows: which rows of which Hugging Face tensor (a part) lie one after the other in
the fused tensor. Everything follows from it: `forward` takes the parts in the order of the table's row,
`inverse` gives them back, and a reader of one rank's rows knows where each of them is stored. Elements are
only moved, so a round trip is exact for every dtype.

Letters: R rows of one part, G key/value groups, P query heads per group, D head dim, H hidden, K key heads,
M value heads per key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Run(NamedTuple):
    """`size` consecutive rows of part `part`, from `start`."""

    part: int
    start: int
    size: int


@runtime_checkable
class Transform(Protocol):
    """How one Megatron tensor is made of the Hugging Face tensors of its row, and taken apart."""

    @property
    def name(self) -> str:
        """The word shown by `relax-bridge map` and `audit`."""
        ...

    def runs(self, shapes: Sequence[Shape]) -> tuple[Run, ...]:
        """The rows of the fused tensor, in order, for parts of these shapes; each row of each part once."""
        ...

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Hugging Face -> Megatron."""
        ...

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Megatron -> Hugging Face, in the order of the row."""
        ...

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The Megatron shape for the given Hugging Face shapes."""
        ...


@dataclass(frozen=True)
class Identity:
    """One tensor, unchanged."""

    name: ClassVar[str] = "identity"

    def runs(self, shapes: Sequence[Shape]) -> tuple[Run, ...]:
        """All rows of the only part."""
        (shape,) = shapes
        return (Run(0, 0, shape[0]),)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the only part."""
        (part,) = parts
        return part

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensor as the only part."""
        return (fused,)

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the only part."""
        (shape,) = shapes
        return shape


class RowOrder:
    """`forward`, `inverse` and `fused_shape` of a transform whose `order()` does not depend on shapes."""

    def order(self) -> tuple[Run, ...]:
        """The rows of the fused tensor."""
        raise NotImplementedError

    def runs(self, shapes: Sequence[Shape]) -> tuple[Run, ...]:
        """`order()`."""
        return self.order()

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """[R_0, ...], [R_1, ...] -> [R_0 + R_1, ...]."""
        return torch.cat([parts[run.part].narrow(0, run.start, run.size) for run in self.order()])

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """[sum R, ...] -> one tensor a part; views where a part's rows lie together."""
        at, pieces = 0, []
        for run in self.order():
            pieces.append((run, fused.narrow(0, at, run.size)))
            at += run.size
        pieces.sort(key=lambda piece: piece[0])
        parts: dict[int, list[Tensor]] = {}
        for run, piece in pieces:
            parts.setdefault(run.part, []).append(piece)
        return tuple(part[0] if len(part) == 1 else torch.cat(part) for part in parts.values())

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Axis 0 is the sum of the parts' rows."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Concat(RowOrder):
    """Parts of `rows` rows stacked along axis 0 in the order of the row."""

    rows: tuple[int, ...]
    name: ClassVar[str] = "concat"

    def order(self) -> tuple[Run, ...]:
        """Each part whole."""
        return tuple(Run(part, 0, rows) for part, rows in enumerate(self.rows))


@dataclass(frozen=True)
class GroupedQkv(RowOrder):
    """Query, key and value rows interleaved by key/value group, as Megatron's `linear_qkv` holds them.

    Plain: q_proj [G*P*D, H], k_proj and v_proj [G*D, H] -> per group [P query heads; key; value].
    Gated (`gate=True`): q_proj is [G*P*2*D, H], per head [query; gate], and a group becomes
    [P query heads; P gate heads; key; value].
    """

    groups: int
    heads_per_group: int
    head_dim: int
    gate: bool

    @property
    def name(self) -> str:
        """`gated_qkv` or `qkv`."""
        return "gated_qkv" if self.gate else "qkv"

    def order(self) -> tuple[Run, ...]:
        """Group by group; with gates head by head, else a group's queries together."""
        d, heads = self.head_dim, self.heads_per_group
        found = []
        for g in range(self.groups):
            if self.gate:
                found += [
                    Run(0, (2 * (g * heads + p) + side) * d, d) for side in (0, 1) for p in range(heads)
                ]
            else:
                found.append(Run(0, g * heads * d, heads * d))
            found += [Run(1, g * d, d), Run(2, g * d, d)]
        return tuple(found)


@dataclass(frozen=True)
class GroupedDeltaNet(RowOrder):
    """Qwen3-Next's projections, interleaved by key head, and Megatron's flat rows q, k, v, z, b, a.

    in_proj_qkvz holds per key head [q (Dk); k (Dk); v (M*Dv); z (M*Dv)], in_proj_ba [b (M); a (M)].
    """

    key_heads: int
    values_per_key: int
    key_dim: int
    value_dim: int
    name: ClassVar[str] = "grouped_delta_net"

    def order(self) -> tuple[Run, ...]:
        """Kind by kind, head by head."""
        value = self.values_per_key * self.value_dim
        found = []
        for part, sizes in enumerate(
            ((self.key_dim, self.key_dim, value, value), (self.values_per_key, self.values_per_key))
        ):
            at = 0
            for size in sizes:
                found += [Run(part, head * sum(sizes) + at, size) for head in range(self.key_heads)]
                at += size
        return tuple(found)

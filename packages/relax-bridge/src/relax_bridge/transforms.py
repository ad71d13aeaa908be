"""Named invertible transforms between Hugging Face tensors and one fused Megatron tensor.

Letters: R rows of one part, G key/value groups, P query heads per group, D head dim, H hidden, K key heads,
M value heads per key head.
`forward` takes the Hugging Face tensors in the order of the row, `inverse` gives them back; both only move
elements, so a round trip is exact for every dtype. Results may share memory with their inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

Shape = tuple[int, ...]


@runtime_checkable
class Transform(Protocol):
    """How one Megatron tensor is made of the Hugging Face tensors of its row, and taken apart."""

    @property
    def name(self) -> str:
        """The word shown by `relax-bridge map` and `audit`."""
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


@dataclass(frozen=True)
class Concat:
    """Parts [R_0, ...], [R_1, ...], ... stacked along axis 0 in the order of the row."""

    rows: tuple[int, ...]
    name: ClassVar[str] = "concat"

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """[R_0, ...], [R_1, ...] -> [R_0 + R_1, ...]."""
        return torch.cat(list(parts), dim=0)

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """[sum R, ...] -> one view a part."""
        return tuple(torch.split(fused, list(self.rows), dim=0))

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Axis 0 is the sum of the parts' rows."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GroupedQkv:
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

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """q_proj, k_proj, v_proj -> [G*(S*P+2)*D, H] with S = 2 if gated else 1."""
        q_proj, k_proj, v_proj = parts
        tail = q_proj.shape[1:]
        sides = 2 if self.gate else 1
        q = q_proj.reshape(self.groups, self.heads_per_group, sides, self.head_dim, *tail)
        q = q.transpose(1, 2).reshape(self.groups, sides * self.heads_per_group, self.head_dim, *tail)
        k = k_proj.reshape(self.groups, 1, self.head_dim, *tail)
        v = v_proj.reshape(self.groups, 1, self.head_dim, *tail)
        return torch.cat([q, k, v], dim=1).reshape(-1, *tail)

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """[G*(S*P+2)*D, H] -> q_proj, k_proj, v_proj."""
        tail = fused.shape[1:]
        sides = 2 if self.gate else 1
        heads = sides * self.heads_per_group
        grouped = fused.reshape(self.groups, heads + 2, self.head_dim, *tail)
        q = grouped[:, :heads].reshape(self.groups, sides, self.heads_per_group, self.head_dim, *tail)
        return (
            q.transpose(1, 2).reshape(-1, *tail),
            grouped[:, heads].reshape(-1, *tail),
            grouped[:, heads + 1].reshape(-1, *tail),
        )

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Axis 0 is the sum of the parts' rows."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GroupedDeltaNet:
    """Qwen3-Next's projections, interleaved by key head, and Megatron's flat rows q, k, v, z, b, a.

    in_proj_qkvz holds per key head [q (Dk); k (Dk); v (M*Dv); z (M*Dv)], in_proj_ba [b (M); a (M)].
    """

    key_heads: int
    values_per_key: int
    key_dim: int
    value_dim: int
    name: ClassVar[str] = "grouped_delta_net"

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """in_proj_qkvz [K*(2*Dk + 2*M*Dv), H], in_proj_ba [K*2*M, H] -> in_proj [the same rows, H]."""
        flat = []
        for part, sizes in zip(parts, self._sizes(), strict=True):
            grouped = part.reshape(self.key_heads, sum(sizes), *part.shape[1:])
            flat += [x.reshape(-1, *part.shape[1:]) for x in torch.split(grouped, list(sizes), dim=1)]
        return torch.cat(flat, dim=0)

    def inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        """in_proj -> in_proj_qkvz, in_proj_ba."""
        sizes = self._sizes()
        rows = [self.key_heads * size for group in sizes for size in group]
        flat = iter(torch.split(fused, rows, dim=0))
        tail = fused.shape[1:]
        return tuple(
            torch.cat([next(flat).reshape(self.key_heads, size, *tail) for size in group], dim=1).reshape(
                -1, *tail
            )
            for group in sizes
        )

    def fused_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Axis 0 is the sum of the parts' rows."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        value = self.values_per_key * self.value_dim
        return (self.key_dim, self.key_dim, value, value), (self.values_per_key, self.values_per_key)

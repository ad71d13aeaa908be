"""Checkpoint layout of fused matrices: each component is a tensor of its own.

A fused matrix on tensor-parallel rank r holds [a_r; b_r; ...]. Stored whole, its rows would depend on the
number of ranks; stored per component, a checkpoint written on any number of ranks reads on any other. So does
one that holds [a; b] for each of several groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def split_rows(
    state: dict[str, Any], key: str, parts: Mapping[str, int], *, axis: int = 0, groups: int = 1
) -> None:
    """Replaces `state[key]`, a tensor sharded over `axis`, by one that is stored per component.

    Args:
        state: a sharded state dict.
        key: of the fused tensor in `state`; component p is stored as `<key>.<p>`.
        parts: rows of each component of a group on this rank, in order.
        axis: of the rows.
        groups: how many times the parts follow one another on this rank.

    Raises:
        ValueError: the rows of the parts do not add up to the tensor's.
    """
    whole: ShardedTensor = state[key]
    if groups * sum(parts.values()) != whole.local_shape[axis]:
        times = f"{groups} times " if groups > 1 else ""
        raise ValueError(
            f"{key} has {whole.local_shape[axis]} rows, its parts {times}{dict(parts)} have "
            f"{groups * sum(parts.values())}"
        )
    template = whole.without_data()

    @torch.no_grad()
    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        assert flattened_range is None, "flattened shards of fused matrices are not written"
        grouped = tensor.reshape(*tensor.shape[:axis], groups, -1, *tensor.shape[axis + 1 :])
        split = torch.split(grouped, list(parts.values()), dim=axis + 1)
        return [
            _part(template, f"{key}.{name}", part.flatten(axis, axis + 1), replica_id, axis)
            for name, part in zip(parts, split, strict=True)
        ]

    @torch.no_grad()
    def merge(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [
            piece.reshape(*piece.shape[:axis], groups, -1, *piece.shape[axis + 1 :]) for piece in pieces
        ]
        return torch.cat(grouped, dim=axis + 1).flatten(axis, axis + 1)

    state[key] = ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)


def _part(
    template: ShardedTensor, key: str, rows: torch.Tensor, replica_id: Any, local_axis: int
) -> ShardedTensor:
    """`rows` of one component, placed as `template` places the whole: the same share of its axis."""
    axis = template.prepend_axis_num + local_axis
    fragments = template.axis_fragmentations[axis]
    rank = template.global_offset[axis] // template.local_shape[local_axis]
    size = rows.shape[local_axis]
    return replace(
        template,
        key=key,
        data=rows,
        dtype=rows.dtype,
        local_shape=tuple(rows.shape),
        global_shape=_at(template.global_shape, axis, size * fragments),
        global_offset=_at(template.global_offset, axis, size * rank),
        replica_id=replica_id,
    )


def _at(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])

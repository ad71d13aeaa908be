"""Checkpoint layout of fused matrices: each component is a tensor of its own.

A fused matrix on tensor-parallel rank r holds [a_r; b_r; ...]. Stored whole, its rows would depend on the
number of ranks; stored per component, a checkpoint written on any number of ranks reads on any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def stored_rows(state: Mapping[str, Any], linear: str) -> list[str]:
    """The tensors of a projection that have its rows: its weight, and the outer one of its adapter."""
    return [key for key in (f"{linear}.weight", f"{linear}.lora_B") if key in state]


def split_rows(state: dict[str, Any], key: str, parts: Mapping[str, int], *, axis: int = 0) -> None:
    """Replaces `state[key]`, a tensor sharded over `axis`, by one that is stored per component.

    Args:
        state: a sharded state dict.
        key: of the fused tensor in `state`; component p is stored as `<key>.<p>`.
        parts: rows of each component on this rank, in order.
        axis: of the rows.

    Raises:
        ValueError: the rows of the parts do not add up to the tensor's.
    """
    whole: ShardedTensor = state[key]
    if sum(parts.values()) != whole.local_shape[axis]:
        raise ValueError(
            f"{key} has {whole.local_shape[axis]} rows, its parts {dict(parts)} have {sum(parts.values())}"
        )
    template = whole.without_data()

    @torch.no_grad()
    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        assert flattened_range is None, "flattened shards of fused matrices are not written"
        shards, start = [], 0
        for name, rows in parts.items():
            part = tensor.narrow(axis, start, rows)
            shards.append(_part(template, f"{key}.{name}", part, replica_id, axis))
            start += rows
        return shards

    state[key] = ShardedTensorFactory(
        whole.key, whole.data, build, partial(torch.cat, dim=axis), whole.replica_id
    )


def place_blocks(state: dict[str, Any], key: str, places: Sequence[int], *, whole: int) -> None:
    """Replaces `state[key]`, a tensor whose rows lie apart from one another in the whole, by its blocks.

    Args:
        state: a sharded state dict.
        key: of the tensor in `state`; it is stored under that key.
        places: the tensor's rows are as many blocks of one size; which blocks of the whole tensor they are.
        whole: blocks of the whole tensor.
    """
    own: ShardedTensor = state[key]
    template = own.without_data()
    axis = template.prepend_axis_num

    @torch.no_grad()
    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        assert flattened_range is None, "flattened shards of fused matrices are not written"
        return [
            replace(
                template,
                key=key,
                data=block,
                dtype=block.dtype,
                local_shape=tuple(block.shape),
                global_shape=_at(template.global_shape, axis, whole * len(block)),
                global_offset=_at(template.global_offset, axis, place * len(block)),
                axis_fragmentations=_at(template.axis_fragmentations, axis, whole),
                replica_id=replica_id,
            )
            for place, block in zip(places, tensor.chunk(len(places)), strict=True)
        ]

    state[key] = ShardedTensorFactory(own.key, own.data, build, torch.cat, own.replica_id)


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

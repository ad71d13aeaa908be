"""Puts tensors of all ranks together to those of the whole model, and refuses replicas that differ.

This looks at every rank's copy, which the trainer's own export has no need to do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from relax_bridge.partition import Replicated
from relax_bridge.table import Entry
from torch import Tensor

from relax_core.model.placement import AdapterEntry, Part, Placement
from relax_core.trainer.trainer import Trainer

_REPLICAS = 1e-12


class ReplicaError(AssertionError):
    """Ranks that must hold the same numbers do not."""


def gather(trainer: Trainer, placement: Placement, read: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """Whole tensors on rank 0, by name; what `read` gives of each parameter (None leaves it out).

    Raises:
        ReplicaError: data-, context- or pipeline-parallel copies differ, or tensor-parallel ones of a tensor
            that is not split.
    """
    mine = {
        name: tensor if tensor is None else part.of(tensor)
        for name, part in _parts(trainer, placement).items()
        for tensor in (read(part.parameter),)
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((_tensor_ranks(), mine), parts if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return {}
    found = {name for _, held in parts for name in held}
    entries: dict[str, Entry | AdapterEntry] = {**placement.entries, **placement.adapters}
    return {
        name: whole
        for name, entry in entries.items()
        if name in found and (whole := _whole(entry, parts)) is not None
    }


def _parts(trainer: Trainer, placement: Placement) -> dict[str, Part]:
    return placement.parts(trainer.chunks) | placement.adapter_parts(trainer.chunks)


def _tensor_ranks() -> dict[bool, int]:
    """This rank among those that split a tensor, by whether it is an expert's."""
    return {
        False: parallel_state.get_tensor_model_parallel_rank(),
        True: parallel_state.get_expert_tensor_parallel_rank(),
    }


def _whole(
    entry: Entry | AdapterEntry, parts: Sequence[tuple[Mapping[bool, int], Mapping[str, Any]]]
) -> Tensor | None:
    shards: dict[int, Tensor] = {}
    for ranks, held in parts:
        tensor = held.get(entry.megatron)
        if tensor is None:
            continue
        rank = ranks[entry.expert is not None]
        _same(entry.megatron, shards.setdefault(rank, tensor), tensor)
    if not shards:
        return None
    ordered = [shards[rank] for rank in sorted(shards)]
    if isinstance(entry.partition, Replicated):
        for other in ordered:
            _same(entry.megatron, ordered[0], other)
        return ordered[0]
    return entry.partition.gather(ordered)


def _same(name: str, a: Tensor, b: Tensor) -> None:
    gap = float((a - b).abs().max()) if a.numel() else 0.0
    if gap > _REPLICAS * max(1.0, float(a.abs().max())):
        raise ReplicaError(f"copies of {name} differ by {gap:.3g} (largest value {float(a.abs().max()):.3g})")

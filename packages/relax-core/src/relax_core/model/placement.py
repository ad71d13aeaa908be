"""Which part of the whole model's tensors lies on this rank, by name and by rows.

A pipeline stage counts its layers from 0, a tensor-parallel rank holds rows, an expert-parallel rank some of
the experts. `Placement` translates both ways: a checkpoint's rows in, whole tensors out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from relax_bridge import Checkpoint, Layout, ModelMap, Shard, import_shards
from torch import Tensor

from relax_core.model.arriving import all_arrived
from relax_core.model.experts import Experts
from relax_core.model.qwen35 import Qwen35Model

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor of the whole model.

    Attributes:
        parameter: where it lies.
        expert: the row of `parameter`, [experts, out, in], that it is; None if it is all of it.
    """

    parameter: torch.nn.Parameter
    expert: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor of the parameter's shape, such as its gradient: a view."""
        return tensor if self.expert is None else tensor[self.expert]


class Placement:
    """The table of a model's tensors, seen from this rank; Megatron's process groups must exist.

    Args:
        table: all tensors of the whole model, `relax_bridge.model_map(config)`.
    """

    def __init__(self, table: ModelMap) -> None:
        self.table = table
        self.entries = {entry.megatron: entry for entry in table.entries}

    def parts(self, chunks: Sequence[Qwen35Model]) -> dict[str, Part]:
        """This rank's parts by their names in the whole model.

        The copy of the embedding that the last stage keeps for its head or its draft layers appears under the
        embedding's name.
        """
        return dict(part for chunk in chunks for part in _parts(chunk))

    def load(self, chunks: Sequence[Qwen35Model], checkpoint: Checkpoint) -> None:
        """Fills this rank's parameters with its rows of a checkpoint, and reads no others.

        Raises:
            ValueError: the checkpoint is not exactly the table's model; everything wrong is named.
        """
        parts = self.parts(chunks)

        def room(shard: Shard) -> Tensor:
            part = parts[shard.entry.megatron]
            return part.of(part.parameter.detach())

        shards = import_shards(
            self.table, checkpoint, layout=_layout(chunks), rank=dist.get_rank(), into=room
        )
        read = {shard.entry.megatron for shard, _ in shards}
        assert read == parts.keys(), f"bridge and model place otherwise: {sorted(read ^ parts.keys())}"

    @torch.no_grad()
    def whole(self, chunks: Sequence[Qwen35Model]) -> Iterator[tuple[str, Tensor]]:
        """Every whole weight by name, in the table's order, on every rank; all must iterate together."""
        for chunk in chunks:
            all_arrived(chunk)
        mine = self.parts(chunks)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_model_parallel_group()
        stages, expert_ranks = _owners(mine, pipeline), _owners(mine, experts)
        for name, entry in self.entries.items():
            tensor = self._joined(mine[name], name) if name in mine else None
            if entry.expert is not None:
                tensor = _shared(tensor, expert_ranks.get(name), experts)
            tensor = _shared(tensor, stages.get(name), pipeline)
            assert tensor is not None, f"no rank holds {name}"
            yield name, tensor

    def _joined(self, part: Part, name: str) -> Tensor:
        tensor = part.of(part.parameter.detach())
        group = self.tensor_ranks(name)
        if group.size() == 1:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(shards, tensor.contiguous(), group=group)
        return self.entries[name].partition.gather(shards)

    def tensor_ranks(self, name: str) -> Any:
        """The group of the ranks over which the rows of a tensor are cut."""
        if self.entries[name].expert is not None:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()


def _layout(chunks: Sequence[Qwen35Model]) -> Layout:
    """What the bridge calls this process's groups; Megatron counts ranks as it does."""
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_chunks=len(chunks),
        first_stage_layers=chunks[0].config.num_layers_in_first_pipeline_stage,
        last_stage_layers=chunks[0].config.num_layers_in_last_pipeline_stage,
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        ranks=dist.get_world_size(),
    )


def named_weights(model: Qwen35Model) -> Iterator[tuple[str, Tensor]]:
    """This rank's weights, detached, as the weight map calls them; experts one by one.

    Writing into one writes into the model.
    """
    return ((name, part.of(part.parameter.detach())) for name, part in _parts(model))


def _parts(chunk: Qwen35Model) -> Iterator[tuple[str, Part]]:
    for name, parameter in chunk.named_parameters():
        whole = _whole_name(chunk, name)
        owner = chunk.get_submodule(name.rsplit(".", 2)[0]) if ".experts." in name else None
        if isinstance(owner, Experts):
            for row in range(len(parameter)):
                yield f"{whole}{owner.first + row}", Part(parameter, row)
        else:
            yield whole, Part(parameter)


def _whole_name(chunk: Qwen35Model, name: str) -> str:
    if name == "output_layer.weight" and chunk.model_config.tied:
        return "embedding.word_embeddings.weight"
    if found := _LAYER.match(name):
        layer = chunk.decoder.layers[int(found[1])].layer_number - 1
        return f"decoder.layers.{layer}.{name[found.end() :]}"
    return name


def _owners(mine: Iterable[str], group: Any) -> dict[str, int]:
    """By name, the first rank within `group` that holds it."""
    held: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(held, list(mine), group=group)
    return {name: rank for rank in reversed(range(len(held))) for name in held[rank]}


def _shared(tensor: Tensor | None, owner: int | None, group: Any) -> Tensor | None:
    """`tensor` of rank `owner` of `group` on all its ranks; None where no rank of the group has it."""
    if group.size() == 1 or owner is None:
        return tensor
    source = dist.get_global_rank(group, owner)
    about: list[Any] = [(tensor.shape, tensor.dtype) if tensor is not None else None]
    dist.broadcast_object_list(about, src=source, group=group)
    shape, dtype = about[0]
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
    shared = tensor.contiguous() if group.rank() == owner and tensor is not None else None
    if shared is None:
        shared = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(shared, src=source, group=group)
    return shared

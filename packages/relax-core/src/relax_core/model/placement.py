"""Which part of the whole model's tensors lies on this rank, by name and by rows.

A pipeline stage counts its layers from 0, a tensor-parallel rank holds rows, an expert-parallel rank some of
the experts. `Placement` translates both ways: a checkpoint's rows in, whole tensors out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from relax_bridge import (
    BridgeError,
    Checkpoint,
    HfShard,
    Layout,
    ModelMap,
    Shard,
    export_shards,
    import_shards,
)
from relax_bridge.partition import Partition, Replicated
from relax_bridge.table import Entry
from torch import Tensor

from relax_core.model.arriving import all_arrived
from relax_core.model.experts import Experts
from relax_core.model.linear import Adapted, is_adapter, merged
from relax_core.model.lora_config import LoraConfig
from relax_core.model.qwen35 import Qwen35Model

_ADAPTED = re.compile(
    r"^((?:decoder|mtp)\.layers\.\d+(?:\.\w+)*?(\.experts)?\.(linear_qkv|linear_proj|in_proj|out_proj|linear_fc[12]))"
    r"\.weight(\d*)$"
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor of the whole model.

    Attributes:
        parameter: where it lies.
        expert: the row of `parameter`, [experts, out, in], that it is; None if it is all of it.
        adapted: the projection that it is the weight of, if that has an adapter.
    """

    parameter: torch.nn.Parameter
    expert: int | None = None
    adapted: Adapted | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor of the parameter's shape, such as its gradient: a view."""
        return tensor if self.expert is None else tensor[self.expert]

    def value(self) -> Tensor:
        """The tensor, with its adapter added if it has one: what the model multiplies by."""
        weight = self.of(self.parameter.detach())
        if self.adapted is None:
            return weight
        assert self.adapted.lora is not None
        a, b = self.of(self.adapted.lora_A.detach()), self.of(self.adapted.lora_B.detach())
        whole: Tensor = merged(weight, a, b, self.adapted.lora.scale)
        return whole


class AdapterEntry(NamedTuple):
    """A line of the table of adapters: `lora_A` or `lora_B` of one weight.

    Attributes:
        megatron: its name.
        weight: the weight's line.
        partition: how it is cut over tensor-parallel ranks.
        expert: see `relax_bridge.table.Entry`.
    """

    megatron: str
    weight: Entry
    partition: Partition
    expert: int | None


class Placement:
    """The table of a model's tensors, seen from this rank; Megatron's process groups must exist.

    Args:
        table: all tensors of the whole model, `relax_bridge.model_map(config)`.
        lora: the model's adapters.
    """

    def __init__(self, table: ModelMap, lora: LoraConfig | None = None) -> None:
        self.table = table
        self.entries = {entry.megatron: entry for entry in table.entries}
        self.adapters = {
            adapter.megatron: adapter for entry in table.entries for adapter in _adapters(entry, lora)
        }

    def parts(self, chunks: Sequence[Qwen35Model]) -> dict[str, Part]:
        """This rank's weights by their names in the whole model.

        The copy of the embedding that the last stage keeps for its head or its draft layers appears under the
        embedding's name.
        """
        return {n: part for chunk in chunks for n, part in _parts(chunk) if not is_adapter(n)}

    def adapter_parts(self, chunks: Sequence[Qwen35Model]) -> dict[str, Part]:
        """This rank's adapters by their names in the whole model."""
        return {n: part for chunk in chunks for n, part in _parts(chunk) if is_adapter(n)}

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

    def shares(self, chunks: Sequence[Qwen35Model], engine_ranks: int) -> Iterator[HfShard]:
        """This rank's share of every Hugging Face tensor, for an engine that cuts them as the trainer does.

        Adapters are added to their weights. Nothing is exchanged.

        Args:
            chunks: the model.
            engine_ranks: tensor-parallel ranks of the engine.

        Raises:
            BridgeError: the engine cuts tensors otherwise, or this rank does not hold all layers.
        """
        layout = _layout(chunks)
        if layout.pipeline > 1:
            raise BridgeError("a rank of a pipeline holds some layers only; an engine's rank wants all")
        for chunk in chunks:
            all_arrived(chunk)
        own = {name: part.value() for name, part in self.parts(chunks).items()}
        theirs = Layout(tensor=engine_ranks)
        return export_shards(self.table, own, layout=layout, rank=dist.get_rank(), engine=theirs)

    def holds_all(self, chunks: Sequence[Qwen35Model]) -> bool:
        """Whether this rank has whole weights, so that `whole` asks no other for any."""
        layout = _layout(chunks)
        return layout.tensor == layout.pipeline == layout.expert == layout.expert_size == 1

    def whole(self, chunks: Sequence[Qwen35Model]) -> Iterator[tuple[str, Tensor]]:
        """Every whole weight by name, in the table's order, on every rank; all must iterate together.

        Adapters are added to their weights.
        """
        return self._whole(chunks, self.parts(chunks), self.entries)

    def whole_adapters(self, chunks: Sequence[Qwen35Model]) -> Iterator[tuple[AdapterEntry, Tensor]]:
        """Every whole adapter, likewise."""
        stream = self._whole(chunks, self.adapter_parts(chunks), self.adapters)
        return ((self.adapters[name], tensor) for name, tensor in stream)

    @torch.no_grad()
    def _whole(
        self,
        chunks: Sequence[Qwen35Model],
        mine: Mapping[str, Part],
        entries: Mapping[str, Entry] | Mapping[str, AdapterEntry],
    ) -> Iterator[tuple[str, Tensor]]:
        for chunk in chunks:
            all_arrived(chunk)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_model_parallel_group()
        stages, expert_ranks = _owners(mine, pipeline), _owners(mine, experts)
        for name, entry in entries.items():
            tensor = self._joined(mine[name], entry) if name in mine else None
            if entry.expert is not None:
                tensor = _shared(tensor, expert_ranks.get(name), experts)
            tensor = _shared(tensor, stages.get(name), pipeline)
            assert tensor is not None, f"no rank holds {name}"
            yield name, tensor

    def _joined(self, part: Part, entry: Entry | AdapterEntry) -> Tensor:
        tensor = part.value()
        group = tensor_ranks(entry)
        if group.size() == 1:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(shards, tensor.contiguous(), group=group)
        return entry.partition.gather(shards)

    def tensor_ranks(self, name: str) -> Any:
        """The group of the ranks over which the rows of a tensor are cut."""
        return tensor_ranks(self.entries[name])


def _adapters(entry: Entry, lora: LoraConfig | None) -> Iterator[AdapterEntry]:
    """The two matrices of the weight's adapter, if it has one: one is cut as the weight is, one is whole."""
    target = _ADAPTED.match(entry.megatron)
    if lora is None or not lora.rank or target is None:
        return
    name, experts, projection, expert = target.groups()
    if name.startswith("mtp.") and not lora.drafts:
        return
    if ("experts" if experts else projection) not in lora.targets:
        return
    for matrix, axis in (("lora_A", 1), ("lora_B", 0)):
        cut = entry.partition if entry.partition.axis == axis else Replicated()
        yield AdapterEntry(f"{name}.{matrix}{expert}", entry, cut, entry.expert)


def tensor_ranks(entry: Entry | AdapterEntry) -> Any:
    """The group of the ranks over which a tensor is cut."""
    if entry.expert is not None:
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


@torch.no_grad()
def whole_share(share: HfShard) -> HfShard:
    """The whole of which every tensor-parallel rank has a share; all of them ask together.

    The shares go by way of the host: this is for the few tensors that an engine keeps whole.
    """
    if share.tensor.shape == share.shape:
        return share
    experts = share.experts is not None
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if experts
        else parallel_state.get_tensor_model_parallel_group()
    )
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, (share.ranges, share.tensor.cpu()), group=group)
    whole = torch.empty(share.shape, dtype=share.tensor.dtype, device=share.tensor.device)
    for ranges, tensor in parts:
        at = 0
        for start, size in ranges:
            whole.narrow(share.axis, start, size).copy_(tensor.narrow(share.axis, at, size))
            at += size
    return share._replace(tensor=whole)


def named_weights(model: Qwen35Model) -> Iterator[tuple[str, Tensor]]:
    """This rank's weights, detached, as the weight map calls them; experts one by one.

    Writing into one writes into the model.
    """
    return ((name, part.of(part.parameter.detach())) for name, part in _parts(model) if not is_adapter(name))


def _parts(chunk: Qwen35Model) -> Iterator[tuple[str, Part]]:
    for name, parameter in chunk.named_parameters():
        whole = whole_name(chunk, name)
        module = chunk.get_submodule(name.rpartition(".")[0])
        adapted = module if isinstance(module, Adapted) and module.lora and name.endswith("weight") else None
        owner = chunk.get_submodule(name.rsplit(".", 2)[0]) if ".experts." in name else None
        if isinstance(owner, Experts):
            for row in range(len(parameter)):
                yield f"{whole}{owner.first + row}", Part(parameter, row, adapted)
        else:
            yield whole, Part(parameter, adapted=adapted)


def whole_name(chunk: Qwen35Model, name: str) -> str:
    """What a parameter or module of a piece of the layers is called in the whole model."""
    if name == "output_layer.weight" and chunk.model_config.tied:
        return "embedding.word_embeddings.weight"
    if found := _LAYER.match(name):
        layer = chunk.decoder.layers[int(found[1])].layer_number - 1
        return f"decoder.layers.{layer}.{name[found.end() :]}"
    return name


def _owners(mine: Iterable[str], group: Any) -> dict[str, int]:
    """By name, the first rank within `group` that holds it."""
    if group.size() == 1:
        return dict.fromkeys(mine, 0)
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

"""Which part of the whole model's tensors lies on this rank, by name and by rows.

A pipeline stage counts its layers from 0, a tensor-parallel rank holds rows, an expert-parallel rank some of
the experts. `Placement` translates both ways: whole tensors in, whole tensors out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from relax_bridge.table import Entry
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
        entries: all tensors of the whole model, `relax_bridge.model_map(config).entries`.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = {entry.megatron: entry for entry in entries}

    def parts(self, chunks: Sequence[Qwen35Model]) -> dict[str, Part]:
        """This rank's parts by their names in the whole model.

        The copy of the embedding that the last stage keeps for its head or its draft layers appears under the
        embedding's name.
        """
        return dict(part for chunk in chunks for part in _parts(chunk))

    def load(self, chunks: Sequence[Qwen35Model], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this rank's part of every whole tensor into its parameters.

        Raises:
            ValueError: naming parts of this rank that no tensor was given for.
        """
        missing = self.parts(chunks)
        for name, tensor in tensors:
            part = missing.pop(name, None)
            if part is not None:
                _, size, rank = self._tensor_ranks(name)
                part.of(part.parameter.detach()).copy_(self.entries[name].partition.shard(tensor, rank, size))
        if missing:
            raise ValueError(f"no weights were given for {', '.join(sorted(missing))}")

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
        group, size, _ = self._tensor_ranks(name)
        if size == 1:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(shards, tensor.contiguous(), group=group)
        return self.entries[name].partition.gather(shards)

    def _tensor_ranks(self, name: str) -> tuple[Any, int, int]:
        """Group, size and own rank of the ranks over which the rows of a tensor are cut."""
        if self.entries[name].expert is not None:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        return group, group.size(), group.rank()


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

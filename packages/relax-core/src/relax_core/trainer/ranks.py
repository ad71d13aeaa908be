"""Where this rank stands among those that train one model together, and what they tell one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from relax_kernels import upload
from torch import Tensor

from relax_core.device import ParallelConfig


@dataclass(frozen=True)
class Ranks:
    """The place of this rank; sizes are those that `initialise` was given.

    Attributes:
        parallel: sizes of the parallel axes.
        data_size, data_rank: replicas of the model, and which one this rank belongs to.
        context_rank: which part of every row this rank holds.
        last_stage: whether this rank has the head, and with it losses and log-probs.
    """

    parallel: ParallelConfig
    data_size: int
    data_rank: int
    context_rank: int
    last_stage: bool

    @classmethod
    def here(cls, parallel: ParallelConfig | None) -> "Ranks":
        """The place of this process in Megatron's groups."""
        return cls(
            parallel or ParallelConfig(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.is_pipeline_last_stage(),
        )

    def plain(self) -> dict[str, Any]:
        """The sizes of the layout as plain values."""
        return {**self.parallel.model_dump(), "data": self.data_size}

    def add_over_data(self, values: Tensor) -> Tensor:
        """The sum over data- and context-parallel ranks, in place; what each rank measured on its tokens."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(values, group=group)
        return values

    def largest_over_data(self, values: Tensor) -> Tensor:
        """The largest over data- and context-parallel ranks, in place."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    def add_over_context(self, values: Tensor) -> Tensor:
        """The sum over the context-parallel ranks, in place; what each rank has of the same sequences."""
        if self.parallel.context > 1:
            dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def whole_row(self, mine_T: Tensor, places_T: Tensor) -> Tensor:
        """A row from the parts that the context-parallel ranks hold: [T] -> [T * ranks].

        Args:
            mine_T: this rank's part.
            places_T: int64, where in the row the parts of all ranks lie, in rank order.
        """
        group = parallel_state.get_context_parallel_group()
        parts = mine_T.new_empty(mine_T.shape[0] * group.size())
        dist.all_gather_into_tensor(parts, mine_T.contiguous(), group=group)
        return torch.empty_like(parts).index_copy_(0, places_T, parts)

    def broadcast_from_last_stage(self, values: Tensor) -> Tensor:
        """The last pipeline stage's numbers on all stages, in place; of one shape on all of them."""
        if self.parallel.pipeline > 1:
            dist.broadcast(
                values,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return values


class Totals:
    """Metrics of a step on their way to the host of every rank.

    Shares add up over micro-batches and ranks, `*_max` are the largest.

    Args:
        reports: scalars by name, one mapping per micro-batch with the same names; empty before the last
            pipeline stage.
        ranks: where this rank stands.
        device: of the scalars.
    """

    def __init__(self, reports: list[Mapping[str, Tensor]], ranks: Ranks, device: torch.device) -> None:
        self._names: list[str] | None = list(reports[0]) if reports else None
        values = _totals(reports, ranks) if reports else None
        if ranks.parallel.pipeline > 1:
            # Other stages know neither the names nor how many there are: a message of one size for all.
            message = (
                torch.zeros(_NAMES + _VALUES, dtype=torch.uint8, device=device)
                if values is None
                else metrics_message(list(reports[0]), values)
            )
            values = ranks.broadcast_from_last_stage(message)
            self._names = None
        assert values is not None
        self.tensor = values
        """What `read` wants to have on the host."""

    def read(self, tensor: Tensor) -> dict[str, float]:
        """The metrics by name, from `tensor` once it is there."""
        if self._names is not None:
            return dict(zip(self._names, tensor.tolist(), strict=True))
        names = bytes(tensor[:_NAMES].tolist()).rstrip(b"\0").decode().split("\n")
        return dict(zip(names, tensor[_NAMES:].view(torch.float64)[: len(names)].tolist(), strict=True))


_NAMES, _VALUES = 4096, 8 * 256
"""Bytes of a message for names, one a line, and for float64 numbers."""


def _totals(reports: list[Mapping[str, Tensor]], ranks: Ranks) -> Tensor:
    names = list(reports[0])
    table = torch.stack([torch.stack([report[name].double() for name in names]) for report in reports])
    sums = ranks.add_over_data(table.sum(0))
    peaks = ranks.largest_over_data(table.amax(0))
    largest = upload(torch.tensor([name.endswith("_max") for name in names]), table.device)
    return torch.where(largest, peaks, sums)


def metrics_message(names: Sequence[str], values: Tensor) -> Tensor:
    """Names and numbers in one tensor of a fixed size, uint8.

    Raises:
        ValueError: they are more than it holds.
    """
    text = "\n".join(names).encode()
    if len(text) > _NAMES or 8 * len(names) > _VALUES:
        raise ValueError(
            f"{len(names)} metrics of {len(text)} letters: a pipeline's stages tell one another at most "
            f"{_VALUES // 8} metrics of {_NAMES} letters; let the objective report fewer"
        )
    head = upload(torch.frombuffer(bytearray(text.ljust(_NAMES, b"\0")), dtype=torch.uint8), values.device)
    rest = values.new_zeros(_VALUES // 8 - len(names))
    return torch.cat([head, torch.cat([values, rest]).view(torch.uint8)])

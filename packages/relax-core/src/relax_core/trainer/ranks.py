"""Where this rank stands among those that train one model together, and what they tell one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from relax_core.device import ParallelConfig

T = TypeVar("T")


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

    def from_last_stage(self, value: T | None) -> T:
        """What the last pipeline stage has, on all stages; a plain value that can be pickled."""
        if self.parallel.pipeline == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        answer: T = box[0]
        return answer


def total_metrics(reports: list[Mapping[str, Tensor]], ranks: Ranks) -> dict[str, float]:
    """Metrics of a step on every rank: shares add up over micro-batches and ranks, `*_max` are the largest.

    Args:
        reports: scalars by name, one mapping per micro-batch with the same names; empty before the last
            pipeline stage.
        ranks: where this rank stands.
    """
    values: dict[str, float] | None = None
    if reports:
        names = list(reports[0])
        table = torch.stack([torch.stack([report[name].double() for name in names]) for report in reports])
        sums = ranks.add_over_data(table.sum(0))
        peaks = ranks.largest_over_data(table.amax(0))
        largest = torch.tensor([name.endswith("_max") for name in names], device=table.device)
        values = dict(zip(names, torch.where(largest, peaks, sums).tolist(), strict=True))
    return ranks.from_last_stage(values)

"""How many ranks share a model and along which axes, and where in that grid a rank stands.

The rules are Megatron's: ranks are counted tensor axis first and pipeline axis last; experts spread over the
same ranks of a pipeline stage, with a tensor size of their own. With `pipeline_chunks` > 1 (interleaved 1F1B)
every stage holds that many chunks, and the layers go round all stages once per chunk.
"""

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from relax_bridge.errors import BridgeError


class Position(NamedTuple):
    """A rank's place on every axis.

    Attributes:
        pipeline: its stage.
        tensor: its tensor-parallel rank.
        expert: its expert-parallel rank.
        expert_tensor: its tensor-parallel rank inside an expert.
        dense_copy: counts the ranks of the stage that hold the same dense tensors.
        expert_copy: counts the ranks of the stage that hold the same expert tensors.
    """

    pipeline: int
    tensor: int
    expert: int
    expert_tensor: int
    dense_copy: int = 0
    expert_copy: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes.

    Attributes:
        tensor: ranks that split every dense tensor.
        pipeline: stages that split the layers.
        pipeline_chunks: chunks of layers per stage; more than 1 needs more than one stage.
        expert: ranks that split the experts.
        expert_tensor: ranks that split every expert; None takes `tensor`.
        vocab_multiple: the vocabulary is padded to a multiple of `vocab_multiple * tensor` (Megatron's
            `make_vocab_size_divisible_by`).
        first_stage_layers: layers of the first stage, if not an even share.
        last_stage_layers: layers of the last stage, if not an even share.
        ranks: all ranks, data- and context-parallel copies included; None is the fewest that can hold the
            model.

    Raises:
        BridgeError: a size below 1, or `ranks` that the axes do not divide.
    """

    tensor: int = 1
    pipeline: int = 1
    pipeline_chunks: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    vocab_multiple: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("tensor", "pipeline", "pipeline_chunks", "expert", "vocab_multiple")
        }
        sizes["expert_tensor"] = self.expert_size
        bad = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
        if bad:
            raise BridgeError(f"every parallel size must be 1 or more; got {', '.join(bad)}")
        if self.pipeline_chunks > 1 and self.pipeline == 1:
            raise BridgeError(
                f"pipeline_chunks = {self.pipeline_chunks} needs pipeline above 1; set one of them"
            )
        if self.ranks is not None and (self.ranks < 1 or self.ranks % (self.pipeline * self._stage_ranks)):
            raise BridgeError(
                f"ranks = {self.ranks} is no multiple of {self.pipeline * self._stage_ranks}, the fewest "
                f"that hold the model: pipeline {self.pipeline} times lcm(tensor {self.tensor}, "
                f"expert {self.expert} x expert_tensor {self.expert_size})"
            )

    @property
    def expert_size(self) -> int:
        """Ranks that split every expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self._stage_ranks if self.ranks is None else self.ranks

    @property
    def _stage_ranks(self) -> int:
        return lcm(self.tensor, self.expert * self.expert_size)

    def position(self, rank: int) -> Position:
        """Where a rank stands.

        Raises:
            BridgeError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise BridgeError(f"rank {rank} is not in 0..{self.world_size - 1}")
        stage, inner = divmod(rank, self.world_size // self.pipeline)
        dense_copy, tensor = divmod(inner, self.tensor)
        outer, expert_tensor = divmod(inner, self.expert_size)
        expert_copy, expert = divmod(outer, self.expert)
        return Position(stage, tensor, expert, expert_tensor, dense_copy, expert_copy)

    def layers(self, total: int) -> tuple[tuple[range, ...], ...]:
        """The trunk's layers of every stage, one range per chunk.

        Raises:
            BridgeError: the layers do not spread evenly.
        """
        counts = self._stage_counts(total)
        per_chunk = [count // self.pipeline_chunks for count in counts]
        chunks: list[list[range]] = [[] for _ in counts]
        start = 0
        for _ in range(self.pipeline_chunks):
            for stage, count in enumerate(per_chunk):
                chunks[stage].append(range(start, start + count))
                start += count
        return tuple(map(tuple, chunks))

    def _stage_counts(self, total: int) -> list[int]:
        fixed = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        counts: dict[int, int] = {stage: n for stage, n in fixed.items() if n is not None}
        free, left = self.pipeline - len(counts), total - sum(counts.values())
        even = left == 0 if free == 0 else left >= 0 and left % free == 0
        found = [counts.get(stage, left // free if free else 0) for stage in range(self.pipeline)]
        if not even or any(count % self.pipeline_chunks for count in found):
            raise BridgeError(
                f"{total} layers do not spread evenly over {self.pipeline} pipeline stages of "
                f"{self.pipeline_chunks} chunks (first_stage_layers = {self.first_stage_layers}, "
                f"last_stage_layers = {self.last_stage_layers}); give sizes that divide, or set the layers "
                "of the first or last stage"
            )
        return found

"""Memory of one trainer rank by part: what is always there, and what a micro-batch adds at its worst."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.stages import stage_layers
from relax_core.plan.local import Local
from relax_core.plan.parameters import Count, stage_parameters, trained_parts
from relax_core.plan.stage import Stage
from relax_core.plan.tape import measure
from relax_core.trainer.config import TrainerConfig

WORKSPACE = 64 * 2**20
"""Workspaces of the matrix library, which lie in torch's allocator: 32 MiB for each of two handles (torch's
default on Hopper)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank.

    Attributes:
        stage: its pipeline stage.
        weights, gradients, optimizer: by part of the model.
        activations: kept from the forward pass at the peak, by part, all micro-batches in flight together.
        working: what the operation at the peak needs beside them.
        communication: buffers of collectives.
        in_flight: micro-batches whose activations are kept at once.
        at: where the peak is.
        beside: of further models, by name: "reference", "teacher" (weights), "critic" (weights, gradients
            and optimizer).
    """

    stage: int
    weights: Mapping[str, int]
    gradients: Mapping[str, int]
    optimizer: Mapping[str, int]
    activations: Mapping[str, int]
    working: int
    communication: int
    in_flight: int
    at: str
    beside: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "weights": sum(self.weights.values()),
            "gradients": sum(self.gradients.values()),
            "optimizer": sum(self.optimizer.values()),
            "activations": sum(self.activations.values()),
            "working": self.working,
            "communication": self.communication,
            "workspaces": WORKSPACE,
            **self.beside,
        }

    @property
    def static(self) -> int:
        """Bytes that are there also between steps."""
        kinds = (self.weights, self.gradients, self.optimizer, self.beside)
        return sum(sum(part.values()) for part in kinds) + WORKSPACE

    @property
    def peak(self) -> int:
        """Largest number of bytes in torch's allocator."""
        return sum(self.parts.values())


def number_size(name: str) -> int:
    """Bytes of a number format: "fp32" or "bf16"."""
    return {"fp32": 4, "bf16": 2}[name]


@dataclass(frozen=True)
class Beside:
    """A further model on the trainer's ranks.

    Attributes:
        name: "reference", "teacher" or "critic".
        model: its sizes.
        trained: whether it takes gradients, as a critic does; that has a head of one row and no draft layers.
    """

    name: str
    model: Qwen35Config
    trained: bool = False


def rank_memory(
    stage: Stage,
    number: int,
    config: TrainerConfig,
    *,
    data: int,
    expert_data: int,
    micro_batches: int,
    tower: bool = True,
    beside: Sequence[Beside] = (),
) -> RankMemory:
    """A rank of one pipeline stage.

    Args:
        stage: what it runs.
        number: of the stage, from 0.
        config: number formats.
        data: ranks that share the dense weights' optimizer state: data-parallel x context-parallel.
        expert_data: ranks that share the experts'.
        micro_batches: of one optimizer step.
        tower: whether a vision tower is trained.
        beside: further models.
    """
    local = stage.local
    counts = stage_parameters(local, stage.kinds, first=stage.first, last=stage.last, lora=stage.lora)
    bytes_of = _Bytes(config, data, expert_data)
    peak = measure(stage.tape())
    flying = in_flight(local.parallel, number, micro_batches)
    trained = trained_parts(counts, drafts_only=stage.mtp.only, tower=tower)
    return RankMemory(
        stage=number,
        weights={part: bytes_of.weights(count) for part, count in counts.items()},
        gradients={part: bytes_of.gradients(count) for part, count in trained.items()},
        optimizer={part: bytes_of.optimizer(count) for part, count in trained.items()},
        activations={part: round(size * flying) for part, size in peak.by_part.items()},
        working=peak.size - peak.saved,
        communication=_buffers(stage, flying),
        in_flight=max(1, round(flying)),
        at=peak.at,
        beside={one.name: _beside(one, stage, number, bytes_of, tower=tower) for one in beside},
    )


def _beside(one: Beside, stage: Stage, number: int, bytes_of: "_Bytes", *, tower: bool) -> int:
    """Bytes of a further model on a rank of stage `number`."""
    local = replace(stage.local, model=one.model)
    kinds = [one.model.layer_types[i] for i in _layers_of(one.model, stage.local.parallel)[number]]
    counts = stage_parameters(local, kinds, first=stage.first, last=stage.last, critic=one.trained)
    total = sum(bytes_of.weights(count) for count in counts.values())
    if one.trained:
        for count in trained_parts(counts, tower=tower).values():
            total += bytes_of.gradients(count) + bytes_of.optimizer(count)
    return total


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations stage `stage` keeps at once, in the schedule 1F1B (Narayanan et al.
    2021, arXiv 2104.04473, sections 2.2 and 2.3); interleaved ones are counted in whole stages."""
    ranks, chunks = parallel.pipeline, parallel.pipeline_chunks
    if chunks == 1:
        return min(micro_batches, ranks - stage)
    pieces = (ranks - stage - 1) * 2 + (chunks - 1) * ranks + 1
    return min(micro_batches * chunks, pieces) / chunks


@dataclass(frozen=True)
class _Bytes:
    config: TrainerConfig
    data: int
    expert_data: int

    @property
    def _own(self) -> int:
        return number_size(self.config.precision)

    def weights(self, count: Count) -> int:
        return (count.dense + count.expert) * self._own + 4 * count.wide

    def gradients(self, count: Count) -> int:
        each = number_size(self.config.gradient_precision)
        return (count.dense + count.expert) * each + 4 * count.wide

    def optimizer(self, count: Count) -> int:
        means = 2 * number_size(self.config.moment_precision)
        # 16 more bits complete a bfloat16 weight to float32; a float32 weight is complete.
        rest = 2 if self.config.precision == "bf16" else 0
        dense = count.dense * (means + rest) + count.wide * means
        return dense // self.data + count.expert * (means + rest) // self.expert_data


def _buffers(stage: Stage, flying: float) -> int:
    local = stage.local
    total = 0
    if local.parallel.sequence:
        # Megatron keeps one buffer for gathered inputs, as large as the largest.
        widest = 2 if stage.last and stage.depths else 1
        total += widest * local.whole_hidden
    if local.parallel.pipeline > 1:
        # What came from the stage before and what went to the next, and one gradient of each.
        total += round((flying + 1) * local.hidden * ((not stage.first) + (not stage.last)))
    return total


def _layers_of(model: Qwen35Config, parallel: ParallelConfig) -> list[list[int]]:
    """Layers of every pipeline rank."""
    return [
        [layer for piece in pieces for layer in piece]
        for pieces in stage_layers(len(model.layer_types), parallel)
    ]


def stages(local: Local, **options: object) -> list[Stage]:
    """The pipeline stages of a model; a rank with several pieces of the layers counts as one stage."""
    parallel, kinds = local.parallel, local.model.layer_types
    found = []
    for rank, layers in enumerate(_layers_of(local.model, parallel)):
        own = tuple(kinds[layer] for layer in layers)
        found.append(
            Stage(local, own, first=rank == 0, last=rank == parallel.pipeline - 1, **options)  # type: ignore[arg-type]
        )
    return found

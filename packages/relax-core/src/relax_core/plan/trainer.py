"""Memory and time of a trainer on given samples: one pure function over sizes and a device's figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.cost import sample_cost
from relax_core.model.lora_config import LoraConfig
from relax_core.model.mtp_config import MtpConfig
from relax_core.packing import plan_micro_batches
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.local import Local
from relax_core.plan.stage import Stage
from relax_core.plan.trainer_memory import Beside, RankMemory, number_size, rank_memory, stages
from relax_core.plan.trainer_time import Layout, StepTime, step_time
from relax_core.plan.vision import Sight
from relax_core.trainer.config import TrainerConfig


@dataclass(frozen=True)
class Batch:
    """How the samples of one optimizer step fall into micro-batches.

    Attributes:
        micro_batches: of each rank.
        longest_row, mean_row: tokens of a packed row.
        tokens: of the whole mini-batch.
        balance: work of the busiest data-parallel rank over the mean of all; 1 is even.
    """

    micro_batches: int
    longest_row: int
    mean_row: float
    tokens: int
    balance: float


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer needs.

    Attributes:
        layout: ranks and groups.
        batch: micro-batches.
        memory: of a rank of every pipeline stage.
        time: of one optimizer step.
    """

    layout: Layout
    batch: Batch
    memory: tuple[RankMemory, ...]
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained a second, by all ranks."""
        return self.batch.tokens / self.time.total

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank in torch's allocator."""
        return max(rank.peak for rank in self.memory)


def plan_trainer(
    model: Qwen35Config,
    parallel: ParallelConfig,
    trainer: TrainerConfig,
    mtp: MtpConfig,
    device: DeviceSpec,
    *,
    ranks: int,
    lengths: Sequence[int],
    scored: float = 1.0,
    entropy: bool = False,
    vision: Literal["absent", "frozen", "trained"] = "absent",
    picture_tokens: int = 0,
    lora: LoraConfig | None = None,
    beside: Sequence[Beside] = (),
) -> TrainerPlan:
    """Plans one optimizer step.

    Args:
        model: sizes, draft layers as trained.
        parallel, trainer, mtp: the settings.
        device: what it runs on.
        ranks: of the trainer.
        lengths: tokens of the samples of one optimizer step.
        scored: share of the tokens that carry loss.
        entropy: whether the loss needs every position's entropy.
        vision: what is done with the model's tower.
        picture_tokens: of a sample's tokens, those that stand for its picture.
        lora: adapters, which are then trained alone.
        beside: further models on the trainer's ranks.

    Raises:
        ValueError: ranks, heads or layers do not divide.
    """
    if ranks % parallel.model_size:
        raise ValueError(f"{ranks} ranks are no multiple of the {parallel.model_size} that share one model")
    layout = Layout(
        ranks,
        parallel.tensor,
        parallel.context,
        parallel.pipeline,
        parallel.expert,
        ranks // parallel.model_size,
    )
    batch, sample = split(model, parallel, trainer, lengths, layout.data)

    def stages_of(row: float) -> list[Stage]:
        local = Local.of(
            model,
            parallel,
            tokens=max(1, round(row)),
            activation=number_size(trainer.precision),
            sample=sample,
            even=min(lengths) == max(lengths),
            scored=scored,
        )
        return stages(
            local,
            recompute=trainer.recompute,
            mtp=mtp,
            entropy=entropy,
            sight=_sight(model, row * picture_tokens / fmean(lengths), picture_tokens, vision),
            lora=lora,
        )

    shared = layout.data * layout.context
    expert_ranks = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    memory = tuple(
        rank_memory(
            stage,
            number,
            trainer,
            data=shared,
            expert_data=max(1, ranks // parallel.pipeline // expert_ranks),
            micro_batches=batch.micro_batches,
            tower=vision == "trained",
            beside=beside,
        )
        for number, stage in enumerate(stages_of(batch.longest_row))
    )
    time = step_time(
        stages_of(batch.mean_row),
        trainer,
        device,
        layout,
        micro_batches=batch.micro_batches,
    )
    return TrainerPlan(layout, batch, memory, time)


def _sight(
    model: Qwen35Config, tokens: float, picture: int, vision: Literal["absent", "frozen", "trained"]
) -> Sight | None:
    """Pictures of `tokens` tokens in a row, each of `picture` tokens."""
    if model.vision is None or vision == "absent" or not picture:
        return None
    square = model.vision.merge**2
    return Sight(model.vision, max(1, round(tokens)) * square, picture * square, vision == "trained")


def split(
    model: Qwen35Config,
    parallel: ParallelConfig,
    trainer: TrainerConfig,
    lengths: Sequence[int],
    data: int,
) -> tuple[Batch, int]:
    """The trainer's own schedule on `lengths`, and the length of a sample that stands for all of them in
    attention: sum of squares over sum."""
    cost, spaces = sample_cost(model), trainer.spaces(lengths)
    plan = plan_micro_batches(
        spaces,
        trainer.micro_batch_tokens,
        ranks=data,
        multiple_of=parallel.pipeline if parallel.pipeline_chunks > 1 else 1,
        cost=cost,
    )
    rows = [sum(spaces[i] for i in members) for rank in plan for members in rank]
    work = [sum(cost(spaces[i]) for members in rank for i in members) for rank in plan]
    batch = Batch(len(plan[0]), max(rows), fmean(rows), sum(lengths), max(work) / max(1e-9, fmean(work)))
    return batch, round(sum(n * n for n in lengths) / sum(lengths))

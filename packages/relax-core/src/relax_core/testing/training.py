"""`train`: three optimizer steps of a row's model on this rank's layout, and all that they measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from relax_bridge import model_map
from relax_bridge.partition import Replicated
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, get_algorithm
from relax_core.device import ParallelConfig, World
from relax_core.loop.objectives import PolicyObjective, SftObjective
from relax_core.loop.preferences import PreferenceObjective
from relax_core.loop.values import ValueObjective
from relax_core.model import MtpConfig, Qwen35Config
from relax_core.model.arriving import all_arrived
from relax_core.model.build import build_chunks, freeze_tower
from relax_core.model.critic import copy_trunk
from relax_core.model.lora_config import LoraConfig
from relax_core.model.placement import Placement
from relax_core.testing.gather import gather
from relax_core.testing.row import Row
from relax_core.testing.task import fill_adapter, initial_checkpoint, model_config, step_samples
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.optimizer import Training
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """What the training of a row gave, in the names and shapes of the whole model.

    Attributes:
        metrics: of each step.
        gradients: of each step, before clipping, by parameter.
        scores: log-probs of the first step's samples under the last weights.
        weights: after the last step.
        drawn: what the host's generator gave after a checkpoint was written, or read.
    """

    metrics: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    scores: list[Tensor]
    weights: dict[str, Tensor]
    drawn: tuple[float, ...] = ()


def train(row: Row, world: World) -> Measured | None:
    """Runs `row` in this process, which `initialise` made a rank of its layout; the result on rank 0."""
    trainer, placement = make_trainer(row, world)
    return measure(row, trainer, placement, step_samples(row))


def measure(
    row: Row, trainer: Trainer, placement: Placement, steps: Sequence[Sequence[Sample]]
) -> Measured | None:
    """Everything that further steps of a trainer give; the result on rank 0."""
    recording = _Recording(trainer.training, placement, trainer)
    trainer.training = recording
    objective = make_objective(row)
    metrics = [trainer.step(samples, objective).values for samples in steps]
    scores = trainer.score(steps[0], temperature=0.8)
    for chunk in trainer.chunks:
        all_arrived(chunk)
    weights = gather(trainer, placement, _weight)
    if dist.get_rank() != 0:
        return None
    return Measured(metrics, recording.gradients, scores, weights)


def make_trainer(row: Row, world: World) -> tuple[Trainer, Placement]:
    """The row's trainer, with the weights that every layout starts from."""
    facts = model_config(row)
    parallel = ParallelConfig(**row.parallel)
    mtp = MtpConfig(**row.draft)
    # With a large epsilon an update is nearly proportional to its gradient; Adam's usual one would turn the
    # rounding of a gradient near 0 into a step of full size.
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "micro_batch_tokens": 32}
    config = TrainerConfig(
        **{**settings, "precision": row.precision, "balance_coefficient": row.balance, **row.trainer}
    )
    lora = LoraConfig(**row.lora)
    build = partial(
        build_chunks,
        Qwen35Config.from_hf(facts, vision=row.pictures != "none"),
        parallel,
        dtype=torch.bfloat16 if row.precision == "bf16" else torch.float32,
        recompute=config.recompute,
        mtp=mtp,
        device=world.torch_device,
        lora=lora,
    )
    chunks = build()
    if row.pictures == "frozen":
        freeze_tower(chunks)
    placement = Placement(model_map(facts, vision=row.pictures != "none"), lora)
    with initial_checkpoint(facts) as checkpoint:
        placement.load(chunks, checkpoint)
    if row.objective == "value":
        policy, chunks = chunks, build(critic=True)
        copy_trunk(chunks, policy)
        head = placement.entries["output_layer.weight"]
        placement.entries["output_layer.weight"] = head._replace(
            row=replace(head.row, partition=Replicated())
        )
    for name, part in placement.adapter_parts(chunks).items():
        fill_adapter(part, placement.adapters[name], lora.rank)
    trainer = Trainer(chunks, config, mtp, device=world.torch_device, optimizer_steps=10, parallel=parallel)
    return trainer, placement


def make_objective(row: Row) -> TrainingObjective:
    """The row's loss."""
    if row.objective == "sft":
        return SftObjective(AlgorithmConfig(name="sft"))
    if row.objective == "value":
        return ValueObjective(AlgorithmConfig(name="ppo", value_clip=0.3), max_new_tokens=32)
    if row.objective == "dpo":
        return PreferenceObjective(AlgorithmConfig(name="dpo", preference_beta=0.5))
    name = "grpo" if row.objective == "policy" else row.objective
    # Bounds between which about half of the random ratios lie, so that clips act.
    clip: dict[str, Any] = (
        {"clip_low": 0.3, "clip_high": 0.3} if "clip_low" in get_algorithm(name).settings else {}
    )
    config = AlgorithmConfig(name=name, kl="low_var", kl_loss_coef=0.05, entropy_coef=0.01, **clip)
    return PolicyObjective(config, temperature=0.9, max_new_tokens=32, on_policy=False)


class _Recording(Training):
    """Keeps the gradients of every step, complete and in whole tensors."""

    def __init__(self, inner: Training, placement: Placement, trainer: Trainer) -> None:
        super().__init__(inner.chunks, inner.optimizer, inner.scheduler, inner.device)
        object.__setattr__(self, "gradients", [])
        object.__setattr__(self, "_collect", lambda: gather(trainer, placement, _gradient))

    gradients: list[dict[str, Tensor]]

    def step(self, grad_norm: Tensor) -> float:
        """As `Training.step`, after the gradients were gathered."""
        for chunk in self.chunks:
            _complete(chunk)
        self.gradients.append(self._collect())  # type: ignore[attr-defined]
        return super().step(grad_norm)


def _gradient(parameter: Any) -> Tensor | None:
    return parameter.main_grad.detach().double().cpu() if parameter.requires_grad else None


def _weight(parameter: Any) -> Tensor:
    return cast(Tensor, parameter.detach().double().cpu())


def _complete(wrapped: Any) -> None:
    """After the reduction each data-parallel rank has its part of a bucket's sum: gathers the others'."""
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, part, group=group)

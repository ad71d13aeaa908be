"""Megatron's data-parallel wrapper, distributed Adam and learning-rate schedule, from `TrainerConfig`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from relax_core.trainer.adam import Adam, shard_places
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.weight_gradients import fuse_weight_gradients


class NonFiniteGradientError(ValueError):
    """The gradient of an optimizer step holds inf or NaN; the weights are those from before the step."""


@dataclass(frozen=True)
class Training:
    """A model made trainable: gradients are summed, not averaged, over data-parallel ranks.

    Summing is what `LossReducer` asks for, whose shares already carry the global denominator.

    Attributes:
        chunks: the pieces of the layers on this rank, wrapped for data parallelism.
        optimizer: Megatron's.
        scheduler: of the learning rate.
        device: where the weights lie.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    device: torch.device

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        for chunk in self.chunks:
            # Every module of a model is asked, which takes the host longer than to queue a layer.
            if not chunk.module.training:
                chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        """Completes gradients over ranks, where no schedule of Megatron's did."""
        finalize_model_grads(list(self.chunks))

    def step(self, grad_norm: torch.Tensor) -> float:
        """Applies the accumulated gradients, clipped; nothing is read from the device. Returns the learning
        rate used.

        A gradient that holds inf or NaN changes no weight and no state. Whoever reads the norm has to see it:
        `refuse_non_finite`.

        Args:
            grad_norm: what `grad_norm` gave for them.
        """
        self.scheduler.step(increment=1)
        scale = clip_factor(grad_norm, self.optimizer.config.clip_grad)
        for adam in self.adams:
            adam.grad_scale = scale
        self.optimizer.step_with_ready_grads()
        return float(self.scheduler.get_lr({}))

    def refuse_non_finite(self, grad_norm: float) -> None:
        """Takes the count of a step back that was left out.

        Args:
            grad_norm: of the step, read.

        Raises:
            NonFiniteGradientError: the norm is inf or NaN.
        """
        if math.isfinite(grad_norm):
            return
        self.scheduler.step(increment=-1)
        for adam in self.adams:
            adam.take_back()
        raise NonFiniteGradientError(
            f"the gradient norm is {grad_norm}: the optimizer step was not taken, and the last "
            "checkpoint is from before it. Look for samples or rewards that are not finite, or lower "
            "trainer.lr"
        )

    @property
    def adams(self) -> list[Adam]:
        """The optimizers proper inside Megatron's; none on a rank without trainable weights."""
        inner = [getattr(one, "optimizer", None) for one in self.optimizer.chained_optimizers]
        return [adam for adam in inner if isinstance(adam, Adam)]

    def grad_norm(self) -> torch.Tensor:
        """Norm of the whole model's gradient before clipping, float64; weights that several ranks hold count
        once."""
        # Megatron looks for inf and NaN only where it scales the loss, as float16 would need.
        self.optimizer.prepare_grads()
        squares = []
        for one in self.optimizer.chained_optimizers:
            grads = one.get_main_grads_for_grad_norm()
            norms = (
                torch._foreach_norm(grads, 2, torch.float32)
                if grads
                else [torch.zeros((), device=self.device)]
            )
            square = torch.stack(norms).double().square().sum()
            dist.all_reduce(square, group=one.get_grad_stats_parallel_group())
            squares.append(square)
        return torch.stack(squares).sum().sqrt()


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What a gradient of this norm is multiplied by, float32 [] on the norm's device; NaN leaves the step
    out.

    Args:
        norm: [].
        limit: largest norm; 0 for none.
    """
    one = torch.ones_like(norm)
    # A number over a tensor would be its reciprocal times the number, which rounds twice.
    clipped = torch.where(norm > limit, norm.new_full((), limit) / norm, one) if limit > 0 else one
    return torch.where(norm.isfinite(), clipped, torch.nan).float()


def make_trainable(chunks: Sequence[Any], config: TrainerConfig, *, optimizer_steps: int) -> Training:
    """Wraps `chunks` (the `Qwen35Model`s of this rank, on its device) for `optimizer_steps` steps.

    Raises:
        ValueError: the warm-up is as long as the whole run.
    """
    if config.warmup_steps >= optimizer_steps:
        raise ValueError(
            f"trainer.warmup_steps is {config.warmup_steps}, but the run takes {optimizer_steps} optimizer "
            f"steps: give at most {optimizer_steps - 1}"
        )
    wrapped = [_wrap(chunk, config) for chunk in chunks]
    model_config: Any = chunks[0].config
    several = len(chunks) > 1
    model_config.no_sync_func = [one.no_sync for one in wrapped] if several else wrapped[0].no_sync
    optimizer = _make_optimizer(wrapped, config)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=optimizer_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=optimizer_steps,
        wd_incr_style="constant",
        # A run that goes on with another number of steps follows the schedule of its new length.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return Training(wrapped, optimizer, scheduler, next(chunks[0].parameters()).device)


def _make_optimizer(wrapped: list[Any], config: TrainerConfig) -> Any:
    bf16 = config.precision == "bf16"
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=config.overlap_param_gather,
    )
    # Megatron's own check of this path asks for Transformer Engine, whose place `Adam` takes.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(settings, wrapped)
    states = torch.bfloat16 if config.moment_precision == "bf16" else torch.float32
    for one in optimizer.chained_optimizers:
        if getattr(one, "optimizer", None) is not None:
            places = shard_places(one, wrapped)
            one.optimizer = Adam(one.optimizer.param_groups, places, state_dtype=states)
    return optimizer


def _wrap(chunk: Any, config: TrainerConfig) -> DistributedDataParallel:
    # Per-token loss in Megatron's words: neither the schedule nor the reduction divides anything.
    chunk.config.calculate_per_token_loss = True
    chunk.config.finalize_model_grads_func = _finalize_without_scaling
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=config.gradient_precision == "fp32",
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    wrapped = DistributedDataParallel(chunk.config, settings, chunk)
    fuse_weight_gradients(chunk)
    return wrapped


def _finalize_without_scaling(model: list[nn.Module], num_tokens: Any = None, **groups: Any) -> None:
    """Megatron's reduction of gradients, without its division by a token count."""
    finalize_model_grads(model, None, **groups)

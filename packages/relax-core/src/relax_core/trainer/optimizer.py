"""Megatron's data-parallel wrapper, distributed Adam and learning-rate schedule, from `TrainerConfig`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from relax_core.trainer.config import TrainerConfig


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
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> tuple[float, float]:
        """Applies the accumulated gradients. Returns (gradient norm before clipping, learning rate used).

        Raises:
            NonFiniteGradientError: the norm is inf or NaN; neither weights nor schedule have moved.
        """
        # Megatron looks for inf and NaN only where it scales the loss, as float16 would need.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteGradientError(
                f"the gradient norm is {grad_norm}: the optimizer step was not taken, and the last "
                "checkpoint is from before it. Look for samples or rewards that are not finite, or lower "
                "trainer.lr"
            )
        self.scheduler.step(increment=1)
        limit = self.optimizer.config.clip_grad
        parameters = [p for one in self.optimizer.chained_optimizers for p in one.get_parameters()]
        if parameters and 0 < limit < grad_norm:
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=grad_norm)
        self.optimizer.step_with_ready_grads()
        return grad_norm, max(group["lr"] for group in self.optimizer.param_groups)


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
    bf16 = config.precision == "bf16"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
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
        ),
        wrapped,
    )
    _fuse(optimizer)
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
    return Training(wrapped, optimizer, scheduler)


def _fuse(optimizer: Any) -> None:
    """Lets torch's Adam update all weights on a CUDA device in one pass over memory.

    Its default there is one pass for each operation of the formula, with temporaries of the weights' size.
    """
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups if one.optimizer else ():
            on_cuda = all(parameter.device.type == "cuda" for parameter in group["params"])
            group["fused"] = on_cuda and isinstance(one.optimizer, torch.optim.Adam)


def _wrap(chunk: Any, config: TrainerConfig) -> DistributedDataParallel:
    # Per-token loss in Megatron's words: neither the schedule nor the reduction divides anything.
    chunk.config.calculate_per_token_loss = True
    chunk.config.finalize_model_grads_func = _finalize_without_scaling
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    return DistributedDataParallel(chunk.config, settings, chunk)


def _finalize_without_scaling(model: list[nn.Module], num_tokens: Any = None, **groups: Any) -> None:
    """Megatron's reduction of gradients, without its division by a token count."""
    finalize_model_grads(model, None, **groups)

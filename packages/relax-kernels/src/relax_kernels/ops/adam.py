"""AdamW on one tensor or many, in place, with a float32 weight that may be kept as bfloat16 and 16 more bits.

N elements.
"""

from __future__ import annotations

from typing import Any

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.ops.adam_shards import AdamShard, AdamShards, check_shard
from relax_kernels.registry import implementation


def adamw_step(
    weight_N: torch.Tensor,
    grad_N: torch.Tensor,
    mean_N: torch.Tensor,
    square_N: torch.Tensor,
    rest_N: torch.Tensor | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor = 1.0,
    seed: int = 0,
    first: int = 0,
    backend: str | None = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2); changes its tensors.

        mean = beta1 mean + (1 - beta1) g;  square = beta2 square + (1 - beta2) g^2,  g = grad_scale grad
        weight = (1 - lr weight_decay) weight
                 - lr mean / (1 - beta1^step) / (sqrt(square / (1 - beta2^step)) + eps)

    Everything is computed in float32 (float64 for float64 weights) from the stored values; the new mean and
    square are used before they are rounded to their dtype. With `rest_N` the weight is a float32 number: its
    upper 16 bits, rounded to nearest, are the bfloat16 weight, its lower 16 bits are `rest_N`; nothing is
    lost. See `join_float32` and `split_float32`.

    A mean or square in bfloat16 is rounded up or down at random, as often to either as the number is near to
    the other: what a step adds is right on average however small it is. Rounded to nearest, it would stand
    still wherever a step changes it by less than half the distance of bfloat16 numbers, 1/512 to 1/256 of it:
    with beta2 = 0.999 squares would never fall, with 0.95 stop up to 8 % off. The random bits are a hash of
    (seed, step, first + index): the same step gives the same bits, and so do its shards one by one.

    Args:
        weight_N: float32 or float64; bfloat16 with `rest_N`.
        grad_N: float32, bfloat16, or the weight's dtype; not changed.
        mean_N: running mean of gradients, float32 or bfloat16 (or the weight's dtype).
        square_N: running mean of squared gradients, mean_N's dtype.
        rest_N: int16.
        step: number of this step, from 1.
        lr: learning rate.
        beta1: decay of the mean.
        beta2: decay of the squares.
        eps: added to the root.
        weight_decay: decoupled.
        grad_scale: factor of the gradient, for clipping; a number, or a float32 or float64 tensor [] on the
            weight's device, which the host need not wait for. Where the tensor is NaN nothing changes: so a
            step is left out without asking the device.
        seed: of the random rounding, in [0, 2^32); give every weight tensor another one.
        first: place of the first element in the tensor of which this is a shard.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes or dtypes do not fit together, a tensor is not contiguous, or a number is out of
            its range.
        NoBackend: no backend serves the call.
    """
    options: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "grad_scale": grad_scale,
        "seed": seed,
        "first": first,
    }
    call = adamw_step_call(weight_N, grad_N, mean_N, square_N, rest_N, **options)
    with torch.no_grad():
        implementation(call, backend)(weight_N, grad_N, mean_N, square_N, rest_N, **options)


def adamw_step_call(
    weight_N: torch.Tensor,
    grad_N: torch.Tensor,
    mean_N: torch.Tensor,
    square_N: torch.Tensor,
    rest_N: torch.Tensor | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor = 1.0,
    seed: int = 0,
    first: int = 0,
) -> Call:
    """Check the inputs of `adamw_step` and describe the call."""
    check = Checker("adamw_step")
    options: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "grad_scale": grad_scale,
    }
    tensors = check_shard(check, AdamShard(weight_N, grad_N, mean_N, square_N, rest_N, seed, first))
    _check_numbers(check, weight_N.device, **options)
    with torch.no_grad():
        return check.call(tensors, {**options, "seed": seed, "first": first})


def adamw_steps(
    shards: AdamShards,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor = 1.0,
    backend: str | None = None,
) -> None:
    """`adamw_step` on many tensors, bit for bit, without a kernel launch or a check for each of them.

    Args:
        shards: the tensors.
        step: number of this step, from 1.
        lr: learning rate.
        beta1: decay of the mean.
        beta2: decay of the squares.
        eps: added to the root.
        weight_decay: decoupled.
        grad_scale: factor of the gradient, as in `adamw_step`.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: a number is out of its range.
        NoBackend: no backend serves the call.
    """
    options: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "grad_scale": grad_scale,
    }
    call = adamw_steps_call(shards, **options)
    with torch.no_grad():
        implementation(call, backend)(shards, **options)


def adamw_steps_call(
    shards: AdamShards,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor = 1.0,
) -> Call:
    """Check the inputs of `adamw_steps` and describe the call."""
    check = Checker("adamw_steps")
    check.require(
        isinstance(shards, AdamShards),
        f"shards must be an AdamShards (AdamShards([AdamShard(weight, ...), ...])), given "
        f"{type(shards).__name__}",
    )
    options: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "grad_scale": grad_scale,
    }
    _check_numbers(check, shards.shards[0].weight_N.device, **options)
    check.bind("N", shards.elements, "shards")
    with torch.no_grad():
        return check.call([shards.shards[0].weight_N], options)


def _check_numbers(
    check: Checker,
    device: torch.device,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor,
) -> None:
    check.whole("step", step, 1)
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check.not_negative(name, value)
    if isinstance(grad_scale, torch.Tensor):
        check.require(
            grad_scale.dim() == 0
            and grad_scale.dtype in (torch.float32, torch.float64)
            and grad_scale.device == device,
            f"grad_scale must be a number or a float32 or float64 tensor of shape () on {device}, given "
            f"{grad_scale.dtype} of shape {tuple(grad_scale.shape)} on {grad_scale.device}",
        )
    else:
        check.number("grad_scale", grad_scale)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        check.number(name, beta)
        check.require(0 <= beta < 1, f"{name} must be in [0, 1), given {beta}")

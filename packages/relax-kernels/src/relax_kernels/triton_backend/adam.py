"""AdamW on CUDA: one kernel that reads and writes every number once.

N elements, B of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relax_kernels.triton_backend.jit import jit
from relax_kernels.triton_backend.launch import on_device_of

TILE = 1024


@jit
def adamw_kernel(
    weight: tl.tensor,
    rest: tl.tensor,
    grad: tl.tensor,
    mean: tl.tensor,
    square: tl.tensor,
    size: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    kept: tl.tensor,
    rate: tl.tensor,
    root_scale: tl.tensor,
    grad_scale: tl.tensor,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One step; grid (N / B,). SPLIT: the weight is bfloat16 and `rest` its lower 16 bits.

    kept = 1 - lr weight_decay, rate = lr / (1 - beta1^step), root_scale = (1 - beta2^step)^(-1/2).
    """
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < size
    if SPLIT:
        upper_B = tl.load(weight + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        rest_B = tl.load(rest + place, mask=inside, other=0).to(tl.int32)
        upper_B -= (rest_B < 0).to(tl.int32)
        weight_B = ((upper_B << 16) | (rest_B & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        weight_B = tl.load(weight + place, mask=inside, other=0.0)
    grad_B = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * grad_scale
    mean_B = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    square_B = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    mean_B = mean_B * beta1 + grad_B * (1.0 - beta1)
    square_B = square_B * beta2 + grad_B * grad_B * (1.0 - beta2)
    tl.store(mean + place, mean_B.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + place, square_B.to(square.dtype.element_ty), mask=inside)
    weight_B = weight_B * kept - rate * (mean_B / (tl.sqrt(square_B) * root_scale + eps))
    if SPLIT:
        bits_B = weight_B.to(tl.int32, bitcast=True)
        rest_B = (bits_B << 16) >> 16
        upper_B = (bits_B >> 16) + (rest_B < 0).to(tl.int32)
        tl.store(weight + place, upper_B.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(rest + place, rest_B.to(tl.int16), mask=inside)
    else:
        tl.store(weight + place, weight_B, mask=inside)


def adamw_step(
    weight_N: torch.Tensor,
    grad_N: torch.Tensor,
    mean_N: torch.Tensor,
    square_N: torch.Tensor,
    rest_N: torch.Tensor | None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """See `relax_kernels.adamw_step`."""
    size = weight_N.numel()
    if not size:
        return
    with on_device_of(weight_N):
        adamw_kernel[(triton.cdiv(size, TILE),)](
            weight_N,
            weight_N if rest_N is None else rest_N,
            grad_N,
            mean_N,
            square_N,
            size,
            beta1,
            beta2,
            eps,
            1 - lr * weight_decay,
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            grad_scale,
            SPLIT=rest_N is not None,
            B=TILE,
            num_warps=4,
        )

"""AdamW on CUDA: one kernel that reads and writes every number once.

N elements, B of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relax_kernels.torch_backend.adam import noise_start
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
    start: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    share1: tl.tensor,
    share2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    root_scale: tl.tensor,
    grad_scale: tl.tensor,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One step; grid (N / B,). SPLIT: the weight is bfloat16 and `rest` its lower 16 bits.

    share = 1 - beta, decay = lr weight_decay, rate = lr / (1 - beta1^step), root_scale =
    (1 - beta2^step)^(-1/2). Element i rounds by the hash of start + i.
    """
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < size
    if SPLIT:
        upper_B = tl.load(weight + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        rest_B = tl.load(rest + place, mask=inside, other=0).to(tl.int32)
        weight_B = ((upper_B << 16) + rest_B).to(tl.float32, bitcast=True)
    else:
        weight_B = tl.load(weight + place, mask=inside, other=0.0)
    grad_B = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * grad_scale
    mean_B = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    square_B = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    mean_B = mean_B * beta1 + grad_B * share1
    square_B = square_B * beta2 + grad_B * grad_B * share2
    if mean.dtype.element_ty == tl.bfloat16:
        noise_B = hash_bits((place + start).to(tl.uint32))
        tl.store(mean + place, cut_to_bfloat16(mean_B, (noise_B & 0xFFFF).to(tl.int32)), mask=inside)
        tl.store(square + place, cut_to_bfloat16(square_B, (noise_B >> 16).to(tl.int32)), mask=inside)
    else:
        tl.store(mean + place, mean_B, mask=inside)
        tl.store(square + place, square_B, mask=inside)
    weight_B -= decay * weight_B + rate * (mean_B / (tl.sqrt(square_B) * root_scale + eps))
    if SPLIT:
        tl.store(weight + place, cut_to_bfloat16(weight_B, 0x8000), mask=inside)
        tl.store(rest + place, bits_of(weight_B).to(tl.int16), mask=inside)
    else:
        tl.store(weight + place, weight_B, mask=inside)


@jit
def hash_bits(x: tl.tensor) -> tl.tensor:
    """Return the hashes of uint32 numbers that `torch_backend.adam.noise_bits` gives."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """Return the bits of float32 numbers; every NaN as the one that stays NaN without its lower half."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))


@jit
def cut_to_bfloat16(x: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Return float32 numbers cut to bfloat16 after adding to their bits, as `split_float` does it."""
    return ((bits_of(x) + added) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


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
    seed: int,
    first: int,
) -> None:
    """See `relax_kernels.adamw_step`."""
    size = weight_N.numel()
    if not size:
        return
    start = noise_start(seed, step, first)
    with on_device_of(weight_N):
        adamw_kernel[(triton.cdiv(size, TILE),)](
            weight_N,
            weight_N if rest_N is None else rest_N,
            grad_N,
            mean_N,
            square_N,
            size,
            # As int32, so that the kernel is compiled for one type of it.
            start - 2**32 if start >= 2**31 else start,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            eps,
            lr * weight_decay,
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            grad_scale,
            SPLIT=rest_N is not None,
            B=TILE,
            num_warps=4,
        )

"""AdamW in torch, and the random bits of its rounding.

N elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from relax_kernels.ops.adam_shards import AdamShards
from relax_kernels.split_float import cut_to_bfloat16, join_float32, split_float32
from relax_kernels.torch_backend.typed import on_host

SLICE = 2**24
"""Elements worked on at once, which bounds the temporaries."""
_MASK = 0xFFFFFFFF
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and factors of the 32-bit hash "lowbias32" (C. Wellons, https://nullprogram.com/blog/2018/07/31/)."""


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
    grad_scale: float | torch.Tensor,
    seed: int,
    first: int,
) -> None:
    """See `relax_kernels.adamw_step`."""
    taken = None
    if isinstance(grad_scale, torch.Tensor):
        if on_host(grad_scale):
            grad_scale = float(grad_scale.numpy())
            if math.isnan(grad_scale):
                return
        else:
            taken = ~grad_scale.isnan()
    rate, root_scale = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    start = noise_start(seed, step, first)
    for begin in range(0, weight_N.numel(), SLICE):
        part = slice(begin, begin + SLICE)
        exact_N = weight_N[part] if rest_N is None else join_float32(weight_N[part], rest_N[part])
        g_N = grad_N[part].to(exact_N.dtype) * grad_scale
        m_N = mean_N[part].to(exact_N.dtype) * beta1 + g_N * (1 - beta1)
        v_N = square_N[part].to(exact_N.dtype) * beta2 + g_N.square() * (1 - beta2)
        if taken is not None:
            m_N = torch.where(taken, m_N, mean_N[part].to(m_N.dtype))
            v_N = torch.where(taken, v_N, square_N[part].to(v_N.dtype))
        _store(mean_N[part], m_N, square_N[part], v_N, start + begin)
        # One sum, since 1 - lr weight_decay may lie nearer to 1 than float32 can tell.
        change_N = v_N.sqrt_().mul_(root_scale).add_(eps).reciprocal_().mul_(m_N).mul_(rate)
        change_N.add_(exact_N, alpha=lr * weight_decay)
        exact_N.sub_(change_N if taken is None else torch.where(taken, change_N, 0.0))
        if rest_N is not None:
            upper_N, lower_N = split_float32(exact_N)
            weight_N[part].copy_(upper_N)
            rest_N[part].copy_(lower_N)


def adamw_steps(shards: AdamShards, **options: Any) -> None:
    """See `relax_kernels.adamw_steps`."""
    for shard in shards.shards:
        adamw_step(*shard[:5], **options, seed=shard.seed, first=shard.first)


def _store(
    mean_N: torch.Tensor, m_N: torch.Tensor, square_N: torch.Tensor, v_N: torch.Tensor, start: int
) -> None:
    """Writes the new mean and square; bfloat16 ones with the lower and the upper half of the random bits."""
    if mean_N.dtype == torch.bfloat16:
        noise_N = noise_bits(start, m_N)
        m_N = cut_to_bfloat16(m_N.float(), noise_N & 0xFFFF)
        v_N = cut_to_bfloat16(v_N.float(), noise_N >> 16)
    mean_N.copy_(m_N)
    square_N.copy_(v_N)


def noise_start(seed: int, step: int, first: int) -> int:
    """What element 0 of a shard hashes in a step, and the next ones one more each; in [0, 2^32)."""
    return (hash_number((hash_number(seed) + step) & _MASK) + first) & _MASK


def noise_bits(start: int, like_N: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element, as int64: the hashes of start, start + 1, ..."""
    x_N = torch.arange(like_N.numel(), device=like_N.device) + start & _MASK
    for shift, factor in _ROUNDS:
        x_N = (x_N ^ (x_N >> shift)) * factor & _MASK
    return x_N ^ (x_N >> 16)


def hash_number(x: int) -> int:
    """The hash of a number in [0, 2^32), in the same range."""
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x ^ (x >> 16)

"""AdamW on CUDA: one kernel that reads and writes every number once, in all tensors.

N elements, B of one tile, S shards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from relax_kernels.ops.adam_shards import AdamShard, AdamShards
from relax_kernels.torch_backend.adam import hash_number
from relax_kernels.triton_backend.jit import jit
from relax_kernels.triton_backend.launch import on_device_of
from relax_kernels.upload import upload

TILE = 1024
TILES = 4
"""Tiles of one program."""
_ROW = 8
"""int64 numbers of a shard in the table: addresses of weight, rest, gradient, mean and square; elements; the
hash of its seed with its first element in the upper half; the program that it begins with."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@partial(jit, do_not_specialize=["step"])
def adamw_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    step: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    share1: tl.tensor,
    share2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    root_scale: tl.tensor,
    grad_scale: tl.tensor,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    B: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """One step; a program for TILES tiles of one shard, whose row in `table` `owner` names.

    share = 1 - beta, decay = lr weight_decay, rate = lr / (1 - beta1^step), root_scale =
    (1 - beta2^step)^(-1/2). A bfloat16 weight has its lower 16 bits in `rest`. ALIGNED: every address is a
    multiple of 16. SCALE_ON_DEVICE: grad_scale is an address; where it holds NaN nothing changes.
    """
    SPLIT: tl.constexpr = tl.bfloat16 == WEIGHT
    ROUNDED: tl.constexpr = tl.bfloat16 == STATE
    program = tl.program_id(0)
    row = table + tl.load(owner + program).to(tl.int64) * 8
    weight = tl.load(row).to(tl.pointer_type(WEIGHT))
    rest = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    grad = tl.load(row + 2).to(tl.pointer_type(GRAD))
    mean = tl.load(row + 3).to(tl.pointer_type(STATE))
    square = tl.load(row + 4).to(tl.pointer_type(STATE))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        rest = tl.multiple_of(rest, 16)
        grad = tl.multiple_of(grad, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
    size = tl.load(row + 5)
    if SCALE_ON_DEVICE:
        grad_scale = tl.load(grad_scale).to(tl.float32)
        size = tl.where(grad_scale == grad_scale, size, 0)
    noise = tl.load(row + 6)
    start = hash_bits((noise + step).to(tl.uint32)) + (noise >> 32).to(tl.uint32)
    begin = (program - tl.load(row + 7)) * (TILES * B)
    if begin + TILES * B <= size:
        # Without masks, which would keep loads from being wide.
        for tile in range(TILES):
            place_B = begin + tile * B + tl.arange(0, B)
            update(
                weight, rest, grad, mean, square, place_B, None, start, beta1, beta2, share1, share2, eps,
                decay, rate, root_scale, grad_scale, SPLIT, ROUNDED,
            )  # fmt: skip
    else:
        for tile in range(TILES):
            place_B = begin + tile * B + tl.arange(0, B)
            update(
                weight, rest, grad, mean, square, place_B, place_B < size, start, beta1, beta2, share1,
                share2, eps, decay, rate, root_scale, grad_scale, SPLIT, ROUNDED,
            )  # fmt: skip


@jit
def update(
    weight: tl.tensor,
    rest: tl.tensor,
    grad: tl.tensor,
    mean: tl.tensor,
    square: tl.tensor,
    place_B: tl.tensor,
    inside_B: tl.tensor | None,
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
    ROUNDED: tl.constexpr,
) -> None:
    """Update one tile: the elements `place_B` that are `inside_B`."""
    if SPLIT:
        upper_B = tl.load(weight + place_B, mask=inside_B).to(tl.int16, bitcast=True).to(tl.int32)
        rest_B = tl.load(rest + place_B, mask=inside_B).to(tl.int32)
        weight_B = ((upper_B << 16) + rest_B).to(tl.float32, bitcast=True)
    else:
        weight_B = tl.load(weight + place_B, mask=inside_B)
    grad_B = tl.load(grad + place_B, mask=inside_B).to(tl.float32) * grad_scale
    mean_B = tl.load(mean + place_B, mask=inside_B).to(tl.float32)
    square_B = tl.load(square + place_B, mask=inside_B).to(tl.float32)
    mean_B = mean_B * beta1 + grad_B * share1
    square_B = square_B * beta2 + grad_B * grad_B * share2
    if ROUNDED:
        noise_B = hash_bits(start + place_B.to(tl.uint32))
        tl.store(mean + place_B, cut_to_bfloat16(mean_B, (noise_B & 0xFFFF).to(tl.int32)), mask=inside_B)
        tl.store(square + place_B, cut_to_bfloat16(square_B, (noise_B >> 16).to(tl.int32)), mask=inside_B)
    else:
        tl.store(mean + place_B, mean_B, mask=inside_B)
        tl.store(square + place_B, square_B, mask=inside_B)
    weight_B -= decay * weight_B + rate * (mean_B / (tl.sqrt(square_B) * root_scale + eps))
    if SPLIT:
        tl.store(weight + place_B, cut_to_bfloat16(weight_B, 0x8000), mask=inside_B)
        tl.store(rest + place_B, bits_of(weight_B).to(tl.int16), mask=inside_B)
    else:
        tl.store(weight + place_B, weight_B, mask=inside_B)


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
    seed: int,
    first: int,
    **options: Any,
) -> None:
    """See `relax_kernels.adamw_step`."""
    adamw_steps(AdamShards([AdamShard(weight_N, grad_N, mean_N, square_N, rest_N, seed, first)]), **options)


def adamw_steps(
    shards: AdamShards,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float | torch.Tensor,
) -> None:
    """See `relax_kernels.adamw_steps`."""
    table, owner, aligned = shards.table("triton", lambda: _tables(shards))
    if not len(owner):
        return
    one = shards.shards[0]
    with on_device_of(one.weight_N):
        adamw_kernel[(len(owner),)](
            table,
            owner,
            step,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            eps,
            lr * weight_decay,
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            grad_scale,
            WEIGHT=_TYPES[one.weight_N.dtype],
            GRAD=_TYPES[one.grad_N.dtype],
            STATE=_TYPES[one.mean_N.dtype],
            ALIGNED=aligned,
            SCALE_ON_DEVICE=isinstance(grad_scale, torch.Tensor),
            B=TILE,
            TILES=TILES,
            num_warps=4,
        )


def _tables(shards: AdamShards) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The shards' rows (int64 [S, 8]), the shard of each program (int32), and whether all is aligned."""
    sizes_S = np.array([shard.weight_N.numel() for shard in shards.shards])
    programs_S = -(-sizes_S // (TILE * TILES))
    rows = np.empty((len(sizes_S), _ROW), dtype=np.int64)
    for row, shard in zip(rows, shards.shards, strict=True):
        weight, grad, mean, square, rest, seed, first = shard
        row[:5] = [x.data_ptr() for x in (weight, weight if rest is None else rest, grad, mean, square)]
        # The halves of one number: it is negative where the upper one is large.
        row[6] = np.uint64(hash_number(seed) | (first & 0xFFFFFFFF) << 32).astype(np.int64)
    rows[:, 5] = sizes_S
    rows[:, 7] = programs_S.cumsum() - programs_S
    owner = np.repeat(np.arange(len(sizes_S), dtype=np.int32), programs_S)
    device = shards.shards[0].weight_N.device
    aligned = not (rows[:, :5] % 16).any()
    return upload(torch.from_numpy(rows), device), upload(torch.from_numpy(owner), device), aligned

"""Partial rotary embedding on CUDA: one kernel, its own inverse with the sign of the sine turned.

T tokens, H heads, D head dim, R rotated features, P = R / 2 pairs; B rows (one head of one token each) of one
tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from relax_kernels.triton_backend.jit import apply, jit
from relax_kernels.triton_backend.launch import dense_rows, on_device_of

TILE = 4096


@jit
def rotary_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    x_stride_t: tl.tensor,
    x_stride_h: tl.tensor,
    cos_stride_t: tl.tensor,
    sin_stride_t: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    B: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """Rotate B heads; grid (T * H / B,). PAIRS and REST: R / 2 and D - R padded to powers of two."""
    P: tl.constexpr = R // 2
    row = tl.program_id(0) * B + tl.arange(0, B)
    token = (row // H).to(tl.int64)
    head = row % H
    source = token * x_stride_t + head * x_stride_h
    target = row.to(tl.int64) * D
    pair = tl.arange(0, PAIRS)
    inside = (row < rows)[:, None] & (pair < P)[None, :]
    at_x = source[:, None] + pair[None, :]
    at_cos = (token * cos_stride_t)[:, None] + pair[None, :]
    at_sin = (token * sin_stride_t)[:, None] + pair[None, :]
    first = tl.load(x + at_x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at_x + P, mask=inside, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + at_cos, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + at_cos + P, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + at_sin, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + at_sin + P, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y_first = first * cos_first + second * sin_second
        y_second = second * cos_second - first * sin_first
    else:
        y_first = first * cos_first - second * sin_first
        y_second = second * cos_second + first * sin_second
    at_y = target[:, None] + pair[None, :]
    tl.store(y + at_y, y_first.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at_y + P, y_second.to(y.dtype.element_ty), mask=inside)
    if R < D:
        rest = R + tl.arange(0, REST)
        inside = (row < rows)[:, None] & (rest < D)[None, :]
        kept = tl.load(x + source[:, None] + rest[None, :], mask=inside, other=0.0)
        tl.store(y + target[:, None] + rest[None, :], kept, mask=inside)


def _rotate(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, backward: bool) -> torch.Tensor:
    x_THD, cos_TR, sin_TR = dense_rows(x_THD), dense_rows(cos_TR), dense_rows(sin_TR)
    T, H, D = x_THD.shape
    R = cos_TR.shape[-1]
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    block = max(1, TILE // triton.next_power_of_2(D))
    if T * H:
        with on_device_of(x_THD):
            rotary_kernel[(triton.cdiv(T * H, block),)](
                x_THD,
                cos_TR,
                sin_TR,
                y_THD,
                T * H,
                *x_THD.stride()[:2],
                cos_TR.stride(0),
                sin_TR.stride(0),
                H=H,
                D=D,
                R=R,
                PAIRS=triton.next_power_of_2(max(R // 2, 1)),
                REST=triton.next_power_of_2(max(D - R, 1)),
                B=block,
                BACKWARD=backward,
                num_warps=4,
            )
    return y_THD


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _rotate(x_THD, cos_TR, sin_TR, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_THD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _rotate(dy_THD, cos_TR, sin_TR, backward=True), None, None


def rotary(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.rotary`."""
    result: torch.Tensor = apply(_Rotary, x_THD, cos_TR, sin_TR)
    return result

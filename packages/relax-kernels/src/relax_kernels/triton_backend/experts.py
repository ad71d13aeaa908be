"""Experts on CUDA: rows moved by one kernel each way, products by torch's grouped matrix product (CUTLASS).

T tokens, E experts, K experts of each token, P = T * K rows sorted by expert, D features in, F features out;
W features of one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from relax_kernels.ops.experts import Permutation
from relax_kernels.triton_backend.jit import apply, jit
from relax_kernels.triton_backend.launch import on_device_of

TILE = 1024


@jit
def combine_kernel(
    y: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> None:
    """Sum one token's K rows, each times its weight; grid (T, ceil(D / W))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    total_D = tl.zeros([W], tl.float32)
    for k in tl.static_range(K):
        start = tl.load(row + token * K + k) * D
        y_D = tl.load(y + start + column, mask=column < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            y_D *= tl.load(weight + token * K + k).to(tl.float32)
        total_D += y_D
    tl.store(out + token * D + column, total_D.to(out.dtype.element_ty), mask=column < D)


@jit
def spread_kernel(
    x: tl.tensor, row: tl.tensor, y: tl.tensor, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr
) -> None:
    """Write one token's features to its K rows; grid (T, ceil(D / W))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    x_D = tl.load(x + token * D + column, mask=column < D, other=0.0)
    for k in tl.static_range(K):
        tl.store(y + tl.load(row + token * K + k) * D + column, x_D, mask=column < D)


@jit
def combine_backward_kernel(
    y: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    dout: tl.tensor,
    dy: tl.tensor,
    dweight: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Gradients of one of a token's K rows and of its weight; grid (T, K)."""
    token = tl.program_id(0).to(tl.int64)
    choice = token * K + tl.program_id(1)
    start = tl.load(row + choice) * D
    share = tl.load(weight + choice).to(tl.float32)
    dot_D = tl.zeros([W], tl.float32)
    for tile in range(0, D, W):
        column = tile + tl.arange(0, W)
        dout_D = tl.load(dout + token * D + column, mask=column < D, other=0.0).to(tl.float32)
        y_D = tl.load(y + start + column, mask=column < D, other=0.0).to(tl.float32)
        dot_D += dout_D * y_D
        tl.store(dy + start + column, (dout_D * share).to(dy.dtype.element_ty), mask=column < D)
    tl.store(dweight + choice, tl.sum(dot_D, axis=0).to(dweight.dtype.element_ty))


def _tile(features: int, row_TK: torch.Tensor) -> dict[str, int]:
    width = min(triton.next_power_of_2(max(features, 1)), TILE)
    return {"D": features, "W": width, "K": row_TK.shape[1], "num_warps": 4}


def _spread(x_TD: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    features = x_TD.shape[1]
    y_PD = torch.empty(row_TK.numel(), features, dtype=x_TD.dtype, device=x_TD.device)
    if y_PD.numel():
        tile = _tile(features, row_TK)
        with on_device_of(x_TD):
            spread_kernel[(len(row_TK), triton.cdiv(features, tile["W"]))](x_TD, row_TK, y_PD, **tile)
    return y_PD


def _combine(y_PD: torch.Tensor, row_TK: torch.Tensor, weight_TK: torch.Tensor | None) -> torch.Tensor:
    features = y_PD.shape[1]
    out_TD = torch.empty(len(row_TK), features, dtype=y_PD.dtype, device=y_PD.device)
    if out_TD.numel():
        tile = _tile(features, row_TK)
        with on_device_of(y_PD):
            combine_kernel[(len(row_TK), triton.cdiv(features, tile["W"]))](
                y_PD,
                row_TK,
                row_TK if weight_TK is None else weight_TK,
                out_TD,
                WEIGHTED=weight_TK is not None,
                **tile,
            )
    return out_TD


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
        row_TK = permutation.row_TK.contiguous()
        ctx.save_for_backward(row_TK)
        return _spread(x_TD.contiguous(), row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_PD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _combine(dx_PD.contiguous(), row_TK, None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: torch.Tensor, weight_TK: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
        y_PD, weight_TK, row_TK = y_PD.contiguous(), weight_TK.contiguous(), row_TK.contiguous()
        ctx.save_for_backward(y_PD, weight_TK, row_TK)
        return _combine(y_PD, row_TK, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y_PD, weight_TK, row_TK = ctx.saved_tensors
        dy_PD, dweight_TK = torch.empty_like(y_PD), torch.empty_like(weight_TK)
        if row_TK.numel():
            with on_device_of(y_PD):
                combine_backward_kernel[row_TK.shape](
                    y_PD,
                    row_TK,
                    weight_TK,
                    dy_TD.contiguous(),
                    dy_PD,
                    dweight_TK,
                    **_tile(y_PD.shape[1], row_TK),
                )
        return dy_PD, dweight_TK, None


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        x_PD = x_PD.contiguous()
        end_E = count_E.cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(x_PD, weight_EFD, end_E)
        return torch._grouped_mm(x_PD, weight_EFD.transpose(1, 2), offs=end_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PD, weight_EFD, end_E = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dy_PF = dy_PF.contiguous()
        dx_PD = torch._grouped_mm(dy_PF, weight_EFD, offs=end_E) if needs_x else None
        dweight_EFD = torch._grouped_mm(dy_PF.T, x_PD, offs=end_E) if needs_weight else None
        return dx_PD, dweight_EFD, None


def permute_tokens(x_TD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """See `relax_kernels.permute_tokens`."""
    x_PD: torch.Tensor = apply(_Permute, x_TD, permutation)
    return x_PD


def unpermute_tokens(y_PD: torch.Tensor, permutation: Permutation, weight_TK: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.unpermute_tokens`."""
    y_TD: torch.Tensor = apply(_Unpermute, y_PD, weight_TK, permutation.row_TK)
    return y_TD


def grouped_matmul(x_PD: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.grouped_matmul`."""
    y_PF: torch.Tensor = apply(_GroupedMatmul, x_PD, weight_EFD.contiguous(), count_E)
    return y_PF

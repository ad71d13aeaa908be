"""Root-mean-square norms on CUDA: one kernel each way; the inverse norms are computed again in the backward
pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import multiprocessors, on_device_of
from relax_kernels.triton_backend.norm_kernels import norm_backward_kernel, norm_kernel
from relax_kernels.triton_backend.rows import as_rows

# Values of one tile: enough bytes in flight for each multiprocessor, few enough for the registers.
TILE = 4096
MAX_FEATURES = 16384


def _tile(features: int) -> dict[str, int]:
    width = triton.next_power_of_2(features)
    return {"D": features, "W": width, "B": max(1, TILE // width), "num_warps": 4 if width < TILE else 8}


def _forward(
    x: torch.Tensor, other: torch.Tensor | None, weight_D: torch.Tensor, eps: float, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and, where ADDED, the sum."""
    rows = as_rows(x)
    others = rows if other is None else as_rows(other)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if options["ADDED"] else y
    if rows.size:
        with on_device_of(x):
            norm_kernel[(triton.cdiv(rows.size, options["B"]),)](
                rows.tensor,
                others.tensor,
                weight_D.contiguous(),
                y,
                total,
                rows.size,
                eps,
                *rows.place,
                *others.place,
                **options,
            )
    return y, total


def _backward(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight_D: torch.Tensor,
    dy: torch.Tensor,
    eps: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients of x, of the gate where GATED, and of the weight."""
    rows, given = as_rows(x), as_rows(dy)
    others = rows if other is None else as_rows(other)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty_like(dx) if options["GATED"] else None
    programs = min(triton.cdiv(rows.size, options["B"]), 8 * multiprocessors(x.device))
    parts_PD = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    if rows.size:
        with on_device_of(x):
            norm_backward_kernel[(programs,)](
                rows.tensor,
                others.tensor,
                weight_D.contiguous(),
                given.tensor,
                dx,
                dx if dgate is None else dgate,
                parts_PD,
                rows.size,
                eps,
                *rows.place,
                *others.place,
                *given.place,
                **options,
            )
    return dx, dgate, parts_PD.sum(0).to(weight_D.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
        zero_centred: bool,
    ) -> torch.Tensor:
        ctx.options = _tile(x.shape[-1]) | {
            "ZERO_CENTRED": zero_centred,
            "GATED": gate is not None,
            "ADDED": False,
        }
        ctx.eps = eps
        ctx.save_for_backward(x, gate, weight_D)
        return _forward(x, gate, weight_D, eps, ctx.options)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight_D = ctx.saved_tensors
        return *_backward(x, gate, weight_D, dy, ctx.eps, ctx.options), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        zero_centred: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.options = _tile(x.shape[-1]) | {"ZERO_CENTRED": zero_centred, "GATED": False, "ADDED": True}
        ctx.eps = eps
        y, total = _forward(x, residual, weight_D, eps, ctx.options)
        ctx.save_for_backward(total, weight_D)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight_D = ctx.saved_tensors
        dx, _, dweight_D = _backward(total, dtotal, weight_D, dy, ctx.eps, ctx.options)
        return dx, dx, dweight_D, None, None


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool) -> torch.Tensor:
    """See `relax_kernels.rms_norm`."""
    result: torch.Tensor = apply(_Norm, x, None, weight_D, eps, zero_centred)
    return result


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """See `relax_kernels.gated_rms_norm`."""
    result: torch.Tensor = apply(_Norm, x, gate, weight_D, eps, False)
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.add_rms_norm`."""
    result: tuple[torch.Tensor, torch.Tensor] = apply(_AddNorm, x, residual, weight_D, eps, zero_centred)
    return result

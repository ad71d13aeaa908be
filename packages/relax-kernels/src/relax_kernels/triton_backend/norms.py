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
from relax_kernels.triton_backend.rows import Rows, as_rows

# Values of one tile: enough bytes in flight for each multiprocessor, few enough for the registers.
TILE = 4096
MAX_FEATURES = 16384


def _tile(features: int) -> dict[str, int]:
    width = triton.next_power_of_2(features)
    return {"D": features, "W": width, "B": max(1, TILE // width), "num_warps": 4 if width < TILE else 8}


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
        rows = as_rows(x)
        gates = rows if gate is None else as_rows(gate)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        options = {**_tile(x.shape[-1]), "ZERO_CENTRED": zero_centred, "GATED": gate is not None}
        if rows.size:
            with on_device_of(x):
                norm_kernel[(triton.cdiv(rows.size, options["B"]),)](
                    rows.tensor,
                    gates.tensor,
                    weight_D.contiguous(),
                    y,
                    rows.size,
                    eps,
                    *rows.place,
                    *gates.place,
                    **options,
                )
        ctx.save_for_backward(x, gate, weight_D)
        ctx.options = (eps, options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight_D = ctx.saved_tensors
        eps, options = ctx.options
        rows, given = as_rows(x), as_rows(dy)
        gates: Rows = rows if gate is None else as_rows(gate)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        programs = min(triton.cdiv(rows.size, options["B"]), 8 * multiprocessors(x.device))
        parts_PD = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
        if rows.size:
            with on_device_of(x):
                norm_backward_kernel[(programs,)](
                    rows.tensor,
                    gates.tensor,
                    weight_D.contiguous(),
                    given.tensor,
                    dx,
                    dx if dgate is None else dgate,
                    parts_PD,
                    rows.size,
                    eps,
                    *rows.place,
                    *gates.place,
                    *given.place,
                    **options,
                )
        return dx, dgate, parts_PD.sum(0).to(weight_D.dtype), None, None


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

"""Root-mean-square norms through npu_rms_norm, in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch

from relax_npu.operators.typed import apply


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool) -> torch.Tensor:
    """Serve `relax_kernels.rms_norm`."""
    return _norm(x, weight_D, eps, zero_centred, x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Serve `relax_kernels.add_rms_norm`; npu_add_rms_norm norms the sum before it is rounded."""
    total = x + residual
    return _norm(total, weight_D, eps, zero_centred, x.dtype), total


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Serve `relax_kernels.gated_rms_norm`."""
    normed = _norm(x, weight_D, eps, False, torch.float32)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)


def _norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, zero_centred: bool, dtype: torch.dtype
) -> torch.Tensor:
    y: torch.Tensor = apply(_RmsNorm, x, weight_D, eps, zero_centred, dtype)
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, zero_centred: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        y, rstd = torch.ops.npu.npu_rms_norm(
            x.float().contiguous(), _factor(weight_D, zero_centred), epsilon=eps
        )
        # The input is kept as it came: half the memory of what the kernel saw.
        ctx.save_for_backward(x, weight_D, rstd)
        ctx.zero_centred = zero_centred
        normed: torch.Tensor = y.to(dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight_D, rstd = ctx.saved_tensors
        dx, dweight_D = torch.ops.npu.npu_rms_norm_backward(
            dy.float().contiguous(), x.float().contiguous(), _factor(weight_D, ctx.zero_centred), rstd
        )
        return dx.to(x.dtype), dweight_D.to(weight_D.dtype), None, None, None


def _factor(weight_D: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    return weight_D.float() + 1.0 if zero_centred else weight_D.float()

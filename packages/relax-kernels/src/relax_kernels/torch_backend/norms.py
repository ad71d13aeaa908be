"""Root-mean-square norms with hand-written backward passes.

D normalised features; tensors are [..., D].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from relax_kernels.torch_backend.typed import accumulation_dtype, apply


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool) -> torch.Tensor:
    """See `relax_kernels.rms_norm`."""
    y: torch.Tensor = apply(_RMSNorm, x, weight_D, eps, zero_centred)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.add_rms_norm`."""
    normed, total = apply(_AddRMSNorm, x, residual, weight_D, eps, zero_centred)
    return normed, total


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """See `relax_kernels.gated_rms_norm`."""
    y: torch.Tensor = apply(_GatedRMSNorm, x, gate, weight_D, eps)
    return y


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _normalise_back(dn: torch.Tensor, n: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Gradient of x from that of n = x * inverse_rms."""
    return torch.addcmul(dn, n, (dn * n).mean(-1, keepdim=True), value=-1).mul_(inverse_rms)


def _sum_leading(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


def _forward(
    ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, zero_centred: bool
) -> torch.Tensor:
    working = accumulation_dtype(x.dtype)
    values = x.to(working)
    inverse_rms = _inverse_rms(values, eps)
    factor_D = weight_D.to(working) + (1.0 if zero_centred else 0.0)
    ctx.save_for_backward(x, inverse_rms, factor_D)
    ctx.weight_dtype = weight_D.dtype
    return (values * inverse_rms).mul_(factor_D).to(x.dtype)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x (not rounded yet) and of the weight."""
    x, inverse_rms, factor_D = ctx.saved_tensors
    n = x.to(inverse_rms.dtype) * inverse_rms
    dy = dy.to(n.dtype)
    return _normalise_back(dy * factor_D, n, inverse_rms), _sum_leading(dy * n).to(ctx.weight_dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, zero_centred: bool
    ) -> torch.Tensor:
        return _forward(ctx, x, weight_D, eps, zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight_D = _backward(ctx, dy)
        return dx.to(dy.dtype), dweight_D, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        zero_centred: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        total = x + residual
        return _forward(ctx, total, weight_D, eps, zero_centred), total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnormed: torch.Tensor | None, dtotal: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dnormed is None:
            return dtotal, dtotal, None, None, None
        dx, dweight_D = _backward(ctx, dnormed)
        if dtotal is not None:
            dx.add_(dtotal)
        dx = dx.to(dnormed.dtype)
        return dx, dx, dweight_D, None, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        working = accumulation_dtype(x.dtype)
        values = x.to(working)
        inverse_rms = _inverse_rms(values, eps)
        ctx.save_for_backward(x, gate, weight_D, inverse_rms)
        y = (values * inverse_rms).mul_(weight_D.to(working)).mul_(F.silu(gate.to(working)))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight_D, inverse_rms = ctx.saved_tensors
        working = inverse_rms.dtype
        n, z, w, dy = x.to(working) * inverse_rms, gate.to(working), weight_D.to(working), dy.to(working)
        opened = F.silu(z).mul_(dy)
        dgate = torch.ops.aten.silu_backward((dy * n).mul_(w), z).to(gate.dtype)
        dweight = _sum_leading(opened * n).to(weight_D.dtype)
        dx = _normalise_back(opened.mul_(w), n, inverse_rms).to(x.dtype)
        return dx, dgate, dweight, None

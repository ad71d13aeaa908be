"""Decay and step size of the delta rule with a hand-written backward pass.

T tokens, U value heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from relax_kernels.torch_backend.typed import accumulation_dtype, apply

LINEAR_FROM = 40.0
"""softplus(x) is x from here on, to less than float64 can hold; torch's own default is good for float32."""


def delta_gates(
    a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.delta_gates`."""
    g_TU, beta_TU = apply(_DeltaGates, a_TU, b_TU, A_log_U, dt_bias_U)
    return g_TU, beta_TU


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        working = accumulation_dtype(a_TU.dtype)
        rate_U = A_log_U.to(working).exp().neg_()
        g_TU = F.softplus(a_TU.to(working) + dt_bias_U.to(working), threshold=LINEAR_FROM).mul_(rate_U)
        ctx.save_for_backward(a_TU, b_TU, A_log_U, dt_bias_U, g_TU)
        return g_TU, torch.sigmoid(b_TU.to(working)).to(b_TU.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg_TU: torch.Tensor, dbeta_TU: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a_TU, b_TU, A_log_U, dt_bias_U, g_TU = ctx.saved_tensors
        working = g_TU.dtype
        rate_U = A_log_U.to(working).exp().neg_()
        da_TU = torch.sigmoid(a_TU.to(working) + dt_bias_U.to(working)).mul_(dg_TU).mul_(rate_U)
        opened_TU = torch.sigmoid(b_TU.to(working))
        db_TU = torch.ops.aten.sigmoid_backward(dbeta_TU.to(working), opened_TU)
        dA_log_U, ddt_bias_U = (dg_TU * g_TU).sum(0), da_TU.sum(0)
        return (
            da_TU.to(a_TU.dtype),
            db_TU.to(b_TU.dtype),
            dA_log_U.to(A_log_U.dtype),
            ddt_bias_U.to(dt_bias_U.dtype),
        )

"""Rotary embedding through npu_rotary_mul.

T tokens, H heads, D head dim, R rotated features.
"""

from __future__ import annotations

from typing import Any

import torch

from relax_npu.operators.typed import apply


def rotary(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Serve `relax_kernels.rotary`."""
    turned: torch.Tensor = apply(_Rotary, x_THD, cos_TR, sin_TR)
    return turned


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _turn(x_THD, cos_TR, sin_TR)

    @staticmethod
    def backward(ctx: Any, dy_THD: torch.Tensor) -> Any:
        cos_TR, sin_TR = ctx.saved_tensors
        # A rotation's transpose turns by the opposite angle.
        return _turn(dy_THD, cos_TR, -sin_TR), None, None


def _turn(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    rotated = cos_TR.shape[1]
    turned_1THR = torch.ops.npu.npu_rotary_mul(
        x_THD[None, ..., :rotated].float().contiguous(),
        cos_TR[None, :, None].float().contiguous(),
        sin_TR[None, :, None].float().contiguous(),
        rotary_mode="half",
    )
    return torch.cat((turned_1THR[0].to(x_THD.dtype), x_THD[..., rotated:]), -1)

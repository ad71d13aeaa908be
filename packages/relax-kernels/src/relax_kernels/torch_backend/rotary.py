"""Partial rotary embedding with a hand-written backward pass.

T tokens, H heads, D head dim, R rotated features, P = R / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.torch_backend.typed import accumulation_dtype, apply


def rotary(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.rotary`."""
    y: torch.Tensor = apply(_Rotary, x_THD, cos_TR, sin_TR)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        working = accumulation_dtype(x_THD.dtype)
        (a, b), (cos_a, cos_b), (sin_a, sin_b) = _pairs(x_THD, cos_TR, sin_TR, working)
        turned_a = (a * cos_a).addcmul_(b, sin_a, value=-1)
        return _join(turned_a, (b * cos_b).addcmul_(a, sin_b), x_THD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos_TR, sin_TR = ctx.saved_tensors
        working = accumulation_dtype(dy_THD.dtype)
        (da, db), (cos_a, cos_b), (sin_a, sin_b) = _pairs(dy_THD, cos_TR, sin_TR, working)
        turned_a = (da * cos_a).addcmul_(db, sin_b)
        return _join(turned_a, (db * cos_b).addcmul_(da, sin_a, value=-1), dy_THD), None, None


def _pairs(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, working: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], ...]:
    rotated_THR = x_THD[..., : cos_TR.shape[-1]].to(working)
    cos_T1R, sin_T1R = cos_TR.to(working).unsqueeze(1), sin_TR.to(working).unsqueeze(1)
    return rotated_THR.chunk(2, -1), cos_T1R.chunk(2, -1), sin_T1R.chunk(2, -1)


def _join(a_THP: torch.Tensor, b_THP: torch.Tensor, x_THD: torch.Tensor) -> torch.Tensor:
    pairs = a_THP.shape[-1]
    y_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    y_THD[..., :pairs] = a_THP
    y_THD[..., pairs : 2 * pairs] = b_THP
    y_THD[..., 2 * pairs :] = x_THD[..., 2 * pairs :]
    return y_THD

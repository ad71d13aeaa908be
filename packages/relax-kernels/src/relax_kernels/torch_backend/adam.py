"""AdamW in torch.

N elements.
"""

from __future__ import annotations

import torch

from relax_kernels.ops.adam import join_float32, split_float32


def adamw_step(
    weight_N: torch.Tensor,
    grad_N: torch.Tensor,
    mean_N: torch.Tensor,
    square_N: torch.Tensor,
    rest_N: torch.Tensor | None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """See `relax_kernels.adamw_step`."""
    exact_N = weight_N if rest_N is None else join_float32(weight_N, rest_N)
    g_N = grad_N.to(exact_N.dtype) * grad_scale
    m_N = mean_N.to(exact_N.dtype) * beta1 + g_N * (1 - beta1)
    v_N = square_N.to(exact_N.dtype) * beta2 + g_N.square() * (1 - beta2)
    mean_N.copy_(m_N)
    square_N.copy_(v_N)
    root_N = v_N.sqrt_().mul_((1 - beta2**step) ** -0.5).add_(eps)
    exact_N.mul_(1 - lr * weight_decay).addcdiv_(m_N, root_N, value=-lr / (1 - beta1**step))
    if rest_N is not None:
        upper_N, lower_N = split_float32(exact_N)
        weight_N.copy_(upper_N)
        rest_N.copy_(lower_N)

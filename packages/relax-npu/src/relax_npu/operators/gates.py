"""SwiGLU through npu_swiglu."""

from __future__ import annotations

from typing import Any

import torch

from relax_npu.operators.typed import apply


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Serve `relax_kernels.swiglu`."""
    product: torch.Tensor = apply(_SwiGlu, gate_up)
    return product


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        product: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
        return product

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        dx: torch.Tensor = torch.ops.npu.npu_swiglu_backward(dy.contiguous(), gate_up, dim=-1)
        return dx

"""SwiGLU and the sigmoid output gate with hand-written backward passes.

F feed-forward features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from relax_kernels.torch_backend.typed import accumulation_dtype, apply


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.swiglu`."""
    y: torch.Tensor = apply(_SwiGLU, gate_up)
    return y


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.output_gate`."""
    y: torch.Tensor = apply(_OutputGate, x, gate)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, -1)
        return F.silu(gate).mul_(up).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        working = accumulation_dtype(gate_up.dtype)
        gate, up = gate_up.to(working).chunk(2, -1)
        dy = dy.to(working)
        return torch.cat((torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)), -1).to(
            gate_up.dtype
        )


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        working = accumulation_dtype(x.dtype)
        return torch.sigmoid(gate.to(working)).mul_(x).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        working = accumulation_dtype(x.dtype)
        opened, dy = torch.sigmoid(gate.to(working)), dy.to(working)
        dgate = torch.ops.aten.sigmoid_backward(dy * x, opened)
        return (dy * opened).to(x.dtype), dgate.to(gate.dtype)

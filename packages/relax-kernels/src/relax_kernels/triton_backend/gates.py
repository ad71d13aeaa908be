"""SwiGLU and the output gate on CUDA: one kernel each way.

R rows, F features of the result; B rows and W features of one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from relax_kernels.triton_backend.jit import apply, jit
from relax_kernels.triton_backend.launch import on_device_of
from relax_kernels.triton_backend.norm_kernels import row_start
from relax_kernels.triton_backend.rows import Rows, as_rows

TILE = 2048


@jit
def gate_kernel(
    value: tl.tensor,
    gate: tl.tensor,
    dy: tl.tensor,
    first_out: tl.tensor,
    second_out: tl.tensor,
    rows: tl.tensor,
    value_inner: tl.tensor,
    value_outer_stride: tl.tensor,
    value_inner_stride: tl.tensor,
    gate_inner: tl.tensor,
    gate_outer_stride: tl.tensor,
    gate_inner_stride: tl.tensor,
    dy_inner: tl.tensor,
    dy_outer_stride: tl.tensor,
    dy_inner_stride: tl.tensor,
    out_stride: tl.tensor,
    F: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """Compute value * act(gate), act = silu or sigmoid, or its gradients; grid (R / B * ceil(F / W),).

    Forward: the result goes to first_out. BACKWARD: the gradient of value to first_out, that of gate to
    second_out.
    """
    parts: tl.constexpr = (F + W - 1) // W
    row = (tl.program_id(0) // parts) * B + tl.arange(0, B)
    column = (tl.program_id(0) % parts) * W + tl.arange(0, W)
    inside = (row < rows)[:, None] & (column < F)[None, :]
    place = row_start(row, value_inner, value_outer_stride, value_inner_stride)[:, None] + column[None, :]
    value_BF = tl.load(value + place, mask=inside, other=0.0).to(tl.float32)
    place = row_start(row, gate_inner, gate_outer_stride, gate_inner_stride)[:, None] + column[None, :]
    gate_BF = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid_BF = tl.sigmoid(gate_BF)
    act_BF = gate_BF * sigmoid_BF if SILU else sigmoid_BF
    out = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if BACKWARD:
        place = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)[:, None] + column[None, :]
        dy_BF = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        slope_BF = sigmoid_BF * (1.0 - sigmoid_BF)
        if SILU:
            slope_BF = sigmoid_BF + gate_BF * slope_BF
        tl.store(first_out + out, (dy_BF * act_BF).to(first_out.dtype.element_ty), mask=inside)
        tl.store(second_out + out, (dy_BF * value_BF * slope_BF).to(second_out.dtype.element_ty), mask=inside)
    else:
        tl.store(first_out + out, (value_BF * act_BF).to(first_out.dtype.element_ty), mask=inside)


def _run(
    value: Rows,
    gate: Rows,
    dy: Rows | None,
    first_out: torch.Tensor,
    second_out: torch.Tensor,
    out_stride: int,
    silu: bool,
) -> None:
    features = value.tensor.shape[-1]
    width = min(triton.next_power_of_2(features), TILE)
    block = max(1, TILE // width)
    grid = (triton.cdiv(value.size, block) * triton.cdiv(features, width),)
    if not grid[0]:
        return
    given = value if dy is None else dy
    with on_device_of(first_out):
        gate_kernel[grid](
            value.tensor,
            gate.tensor,
            given.tensor,
            first_out,
            second_out,
            value.size,
            *value.place,
            *gate.place,
            *given.place,
            out_stride,
            F=features,
            B=block,
            W=width,
            SILU=silu,
            BACKWARD=dy is not None,
            num_warps=4,
        )


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        y = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        _run(as_rows(up), as_rows(gate), None, y, y, y.shape[-1], silu=True)
        ctx.save_for_backward(gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        dgate, dup = result.chunk(2, dim=-1)
        _run(as_rows(up), as_rows(gate), as_rows(dy), dup, dgate, result.shape[-1], silu=True)
        return result


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _run(as_rows(x), as_rows(gate), None, y, y, y.shape[-1], silu=False)
        ctx.save_for_backward(x, gate)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _run(as_rows(x), as_rows(gate), as_rows(dy), dx, dgate, dx.shape[-1], silu=False)
        return dx, dgate


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.swiglu`."""
    result: torch.Tensor = apply(_SwiGLU, gate_up)
    return result


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `relax_kernels.output_gate`."""
    result: torch.Tensor = apply(_OutputGate, x, gate)
    return result

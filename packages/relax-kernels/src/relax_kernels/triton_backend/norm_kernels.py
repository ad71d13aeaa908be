"""Kernels of the root-mean-square norms.

y = x / sqrt(mean x^2 + eps) * w [* silu(gate)] with w = weight or 1 + weight. Where a residual is added first
(ADDED), it takes the gate's place, and in the backward pass the sum takes that of x.

R rows, D features (W of them with the padding to a power of two), B rows of one tile.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def row_start(
    row: tl.tensor, inner: tl.tensor, outer_stride: tl.tensor, inner_stride: tl.tensor
) -> tl.tensor:
    """Return the offset of each row (see `rows`)."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@jit
def norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    x_inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    gate_inner: tl.tensor,
    gate_outer_stride: tl.tensor,
    gate_inner_stride: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
) -> None:
    """Norm B rows; grid (R / B,). ADDED: write x + gate, rounded, to total, and norm that."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    column = tl.arange(0, W)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    place = row_start(row, x_inner, x_outer_stride, x_inner_stride)[:, None] + column[None, :]
    x_BD = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    dense = row.to(tl.int64)[:, None] * D + column[None, :]
    if GATED or ADDED:
        place = row_start(row, gate_inner, gate_outer_stride, gate_inner_stride)[:, None] + column[None, :]
        gate_BD = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        total_BD = (x_BD + gate_BD).to(total.dtype.element_ty)
        tl.store(total + dense, total_BD, mask=inside)
        x_BD = total_BD.to(tl.float32)
    factor_D = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor_D += 1.0
    rstd_B = tl.rsqrt(tl.sum(x_BD * x_BD, axis=1) / D + eps)
    y_BD = x_BD * rstd_B[:, None] * factor_D[None, :]
    if GATED:
        y_BD *= gate_BD * tl.sigmoid(gate_BD)
    tl.store(y + dense, y_BD.to(y.dtype.element_ty), mask=inside)


@jit
def norm_backward_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    dgate: tl.tensor,
    dweight: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    x_inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    gate_inner: tl.tensor,
    gate_outer_stride: tl.tensor,
    gate_inner_stride: tl.tensor,
    dy_inner: tl.tensor,
    dy_outer_stride: tl.tensor,
    dy_inner_stride: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
) -> None:
    """Gradients of every P-th tile of B rows; grid (P,). Writes its part of the weight's gradient, [P, D]
    float32. ADDED: x holds the sums and gate their gradient, which is added to dx.
    """
    column = tl.arange(0, W)
    factor_D = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor_D += 1.0
    dfactor_BD = tl.zeros([B, W], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, B), tl.num_programs(0)):
        row = tile * B + tl.arange(0, B)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        place = row_start(row, x_inner, x_outer_stride, x_inner_stride)[:, None] + column[None, :]
        x_BD = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        place = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)[:, None] + column[None, :]
        dy_BD = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        dense = row.to(tl.int64)[:, None] * D + column[None, :]
        rstd_B = tl.rsqrt(tl.sum(x_BD * x_BD, axis=1) / D + eps)
        normed_BD = x_BD * rstd_B[:, None]
        if GATED or ADDED:
            place = row_start(row, gate_inner, gate_outer_stride, gate_inner_stride)[:, None]
            gate_BD = tl.load(gate + place + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if GATED:
            sigmoid_BD = tl.sigmoid(gate_BD)
            slope_BD = sigmoid_BD * (1.0 + gate_BD * (1.0 - sigmoid_BD))
            dgate_BD = dy_BD * normed_BD * factor_D[None, :] * slope_BD
            tl.store(dgate + dense, dgate_BD.to(dgate.dtype.element_ty), mask=inside)
            dy_BD *= gate_BD * sigmoid_BD
        dfactor_BD += dy_BD * normed_BD
        dy_BD *= factor_D[None, :]
        mean_B = tl.sum(dy_BD * normed_BD, axis=1) / D
        dx_BD = (dy_BD - normed_BD * mean_B[:, None]) * rstd_B[:, None]
        if ADDED:
            dx_BD += gate_BD
        tl.store(dx + dense, dx_BD.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + tl.program_id(0) * D + column, tl.sum(dfactor_BD, axis=0), mask=column < D)

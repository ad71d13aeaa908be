"""The delta rule's gates on CUDA: decay and step size in one kernel each way.

T tokens, U value heads (W of them with the padding to a power of two), B tokens of one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from relax_kernels.triton_backend.jit import apply, jit
from relax_kernels.triton_backend.launch import dense_rows, multiprocessors, on_device_of

TILE = 1024


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)), to a few units in the last place also where it is tiny.

    log(1 + e) = log(u) e / (u - 1) with u = 1 + e as rounded (Kahan).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def delta_gates_kernel(
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    tokens: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    U: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Write g and beta of B tokens; grid (ceil(T / B),)."""
    token = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    head = tl.arange(0, W)
    inside = (token < tokens)[:, None] & (head < U)[None, :]
    rate_U = -tl.exp(tl.load(A_log + head, mask=head < U, other=0.0).to(tl.float32))
    bias_U = tl.load(dt_bias + head, mask=head < U, other=0.0).to(tl.float32)
    a_BU = tl.load(a + token[:, None] * a_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
    b_BU = tl.load(b + token[:, None] * b_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
    place = token[:, None] * U + head[None, :]
    tl.store(g + place, rate_U[None, :] * softplus(a_BU + bias_U[None, :]), mask=inside)
    tl.store(beta + place, tl.sigmoid(b_BU).to(beta.dtype.element_ty), mask=inside)


@jit
def delta_gates_backward_kernel(
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    da: tl.tensor,
    db: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    U: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Gradients of every P-th tile of B tokens; grid (P,). Writes its part of those of A_log and dt_bias to
    parts [P, 2, U] float32.
    """
    head = tl.arange(0, W)
    rate_U = -tl.exp(tl.load(A_log + head, mask=head < U, other=0.0).to(tl.float32))
    bias_U = tl.load(dt_bias + head, mask=head < U, other=0.0).to(tl.float32)
    dA_log_BU = tl.zeros([B, W], tl.float32)
    dbias_BU = tl.zeros([B, W], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, B), tl.num_programs(0)):
        token = (tile * B + tl.arange(0, B)).to(tl.int64)
        inside = (token < tokens)[:, None] & (head < U)[None, :]
        place = token[:, None] * U + head[None, :]
        a_BU = tl.load(a + token[:, None] * a_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
        b_BU = tl.load(b + token[:, None] * b_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
        dg_BU = tl.load(dg + place, mask=inside, other=0.0).to(tl.float32)
        dbeta_BU = tl.load(dbeta + place, mask=inside, other=0.0).to(tl.float32)
        x_BU = a_BU + bias_U[None, :]
        dg_BU *= rate_U[None, :]
        da_BU = dg_BU * tl.sigmoid(x_BU)
        beta_BU = tl.sigmoid(b_BU)
        tl.store(da + place, da_BU.to(da.dtype.element_ty), mask=inside)
        tl.store(db + place, (dbeta_BU * (beta_BU - beta_BU * beta_BU)).to(db.dtype.element_ty), mask=inside)
        dA_log_BU += dg_BU * softplus(x_BU)
        dbias_BU += da_BU
    part = parts + tl.program_id(0) * 2 * U + head
    tl.store(part, tl.sum(dA_log_BU, axis=0), mask=head < U)
    tl.store(part + U, tl.sum(dbias_BU, axis=0), mask=head < U)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a_TU, b_TU = dense_rows(a_TU), dense_rows(b_TU)
        tokens, heads = a_TU.shape
        g_TU = torch.empty(tokens, heads, dtype=torch.float32, device=a_TU.device)
        beta_TU = torch.empty(tokens, heads, dtype=b_TU.dtype, device=b_TU.device)
        width = triton.next_power_of_2(max(heads, 1))
        ctx.tile = {"U": heads, "W": width, "B": max(1, TILE // width), "num_warps": 4}
        if g_TU.numel():
            with on_device_of(a_TU):
                delta_gates_kernel[(triton.cdiv(tokens, ctx.tile["B"]),)](
                    a_TU,
                    b_TU,
                    A_log_U.contiguous(),
                    dt_bias_U.contiguous(),
                    g_TU,
                    beta_TU,
                    tokens,
                    a_TU.stride(0),
                    b_TU.stride(0),
                    **ctx.tile,
                )
        ctx.save_for_backward(a_TU, b_TU, A_log_U, dt_bias_U)
        return g_TU, beta_TU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg_TU: torch.Tensor, dbeta_TU: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a_TU, b_TU, A_log_U, dt_bias_U = ctx.saved_tensors
        tokens, heads = a_TU.shape
        da_TU = torch.empty(tokens, heads, dtype=a_TU.dtype, device=a_TU.device)
        db_TU = torch.empty_like(da_TU)
        programs = min(triton.cdiv(tokens, ctx.tile["B"]), 2 * multiprocessors(a_TU.device))
        parts_P2U = torch.empty(programs, 2, heads, dtype=torch.float32, device=a_TU.device)
        if da_TU.numel():
            with on_device_of(a_TU):
                delta_gates_backward_kernel[(programs,)](
                    a_TU,
                    b_TU,
                    A_log_U.contiguous(),
                    dt_bias_U.contiguous(),
                    dg_TU.contiguous(),
                    dbeta_TU.contiguous(),
                    da_TU,
                    db_TU,
                    parts_P2U,
                    tokens,
                    a_TU.stride(0),
                    b_TU.stride(0),
                    **ctx.tile,
                )
        dA_log_U, ddt_bias_U = parts_P2U.sum(0)
        return da_TU, db_TU, dA_log_U.to(A_log_U.dtype), ddt_bias_U.to(dt_bias_U.dtype)


def delta_gates(
    a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.delta_gates`."""
    result: tuple[torch.Tensor, torch.Tensor] = apply(_DeltaGates, a_TU, b_TU, A_log_U, dt_bias_U)
    return result

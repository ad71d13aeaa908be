"""Decode steps on CUDA: one token of each of N sequences, bounded by reading and writing the states once.

N sequences, H query/key heads, U value heads, K key dim, V value dim (B of it in one program), C channels, W
taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relax_kernels.triton_backend.jit import jit
from relax_kernels.triton_backend.launch import on_device_of


@jit
def delta_step_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    new_state: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Advance B value features of one head of one sequence; grid (N * U, ceil(V / B))."""
    head = tl.program_id(0).to(tl.int64)
    key_head = (head // U) * H + (head % U) // (U // H)
    row, column = tl.arange(0, KP), tl.program_id(1) * B + tl.arange(0, B)
    q_K = tl.load(q + key_head * K + row, mask=row < K, other=0.0).to(tl.float32)
    k_K = tl.load(k + key_head * K + row, mask=row < K, other=0.0).to(tl.float32)
    if NORM:
        q_K *= tl.rsqrt(tl.sum(q_K * q_K, axis=0) + 1e-6)
        k_K *= tl.rsqrt(tl.sum(k_K * k_K, axis=0) + 1e-6)
    v_B = tl.load(v + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    inside = (row < K)[:, None] & (column < V)[None, :]
    place = head * K * V + row[:, None] * V + column[None, :]
    state_KB = tl.load(state + place, mask=inside, other=0.0).to(tl.float32)
    state_KB *= tl.exp(tl.load(g + head).to(tl.float32))
    recalled_B = tl.sum(state_KB * k_K[:, None], axis=0)
    delta_B = (v_B - recalled_B) * tl.load(beta + head).to(tl.float32)
    state_KB += k_K[:, None] * delta_B[None, :]
    out_B = tl.sum(state_KB * q_K[:, None], axis=0) * scale
    tl.store(out + head * V + column, out_B.to(out.dtype.element_ty), mask=column < V)
    tl.store(new_state + place, state_KB.to(new_state.dtype.element_ty), mask=inside)


@jit
def conv_step_kernel(
    x: tl.tensor,
    state: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    new_state: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Convolve B channels of one sequence; grid (N, ceil(C / B))."""
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    inside = channel < C
    x_B = tl.load(x + sequence * C + channel, mask=inside, other=0.0)
    place = (sequence * C + channel) * (W - 1)
    y_B = x_B.to(tl.float32) * tl.load(weight + channel * W + W - 1, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        past_B = tl.load(state + place + tap, mask=inside, other=0.0)
        y_B += past_B.to(tl.float32) * tl.load(weight + channel * W + tap, mask=inside, other=0.0).to(
            tl.float32
        )
        if tap:
            tl.store(new_state + place + tap - 1, past_B, mask=inside)
    tl.store(new_state + place + W - 2, x_B, mask=inside)
    if HAS_BIAS:
        y_B += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y_B *= tl.sigmoid(y_B)
    tl.store(y + sequence * C + channel, y_B.to(y.dtype.element_ty), mask=inside)


def gated_delta_rule_step(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    state_NUKV: torch.Tensor,
    *,
    qk_l2norm: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.gated_delta_rule_step`."""
    sequences, heads, keys, values = state_NUKV.shape
    o_NUV = torch.empty(sequences, heads, values, dtype=q_NHK.dtype, device=q_NHK.device)
    new_NUKV = torch.empty_like(state_NUKV, memory_format=torch.contiguous_format)
    width = triton.next_power_of_2(keys)
    block = max(1, min(triton.next_power_of_2(values), 4096 // width))
    if o_NUV.numel():
        with on_device_of(q_NHK):
            delta_step_kernel[(sequences * heads, triton.cdiv(values, block))](
                *(x.contiguous() for x in (q_NHK, k_NHK, v_NUV, g_NU, beta_NU, state_NUKV)),
                o_NUV,
                new_NUKV,
                scale,
                H=q_NHK.shape[1],
                U=heads,
                K=keys,
                KP=width,
                V=values,
                B=block,
                NORM=qk_l2norm,
                num_warps=4,
            )
    return o_NUV, new_NUKV


def causal_conv1d_step(
    x_NC: torch.Tensor,
    state_NCW: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.causal_conv1d_step`."""
    sequences, channels = x_NC.shape
    y_NC = torch.empty(sequences, channels, dtype=x_NC.dtype, device=x_NC.device)
    new_NCW = torch.empty_like(state_NCW, memory_format=torch.contiguous_format)
    if y_NC.numel():
        weight_CW = weight_CW.contiguous()
        with on_device_of(x_NC):
            conv_step_kernel[(sequences, triton.cdiv(channels, 256))](
                x_NC.contiguous(),
                state_NCW.contiguous(),
                weight_CW,
                weight_CW if bias_C is None else bias_C.contiguous(),
                y_NC,
                new_NCW,
                C=channels,
                W=weight_CW.shape[1],
                B=256,
                HAS_BIAS=bias_C is not None,
                SILU=activation == "silu",
                num_warps=4,
            )
    return y_NC, new_NCW

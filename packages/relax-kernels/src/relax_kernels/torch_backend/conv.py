"""Causal depthwise convolution as W shifted products, with a hand-written backward pass.

T tokens, N sequences, C channels, W taps, E = T + N * (W - 1) rows: each sequence after its W - 1 rows of
history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend.typed import accumulation_dtype, apply
from relax_kernels.upload import upload


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    cu_seqlens: CuSeqlens,
    activation: str | None,
    initial_state_NCW: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.causal_conv1d`."""
    y_TC, state_NCW = apply(
        _CausalConv, x_TC, weight_CW, bias_C, initial_state_NCW, cu_seqlens, activation, output_final_state
    )
    return y_TC, state_NCW if output_final_state else None


def causal_conv1d_step(
    x_NC: torch.Tensor,
    state_NCW: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.causal_conv1d_step`."""
    working = accumulation_dtype(x_NC.dtype)
    window_NCW = torch.cat((state_NCW, x_NC.unsqueeze(-1)), -1)
    y_NC = (window_NCW.to(working) * weight_CW.to(working)).sum(-1)
    if bias_C is not None:
        y_NC = y_NC + bias_C.to(working)
    if activation == "silu":
        y_NC = F.silu(y_NC)
    return y_NC.to(x_NC.dtype), window_NCW[..., 1:].contiguous()


class _Rows:
    """Where tokens and histories lie among the E rows."""

    def __init__(self, lengths: CuSeqlens, history: int, device: torch.device) -> None:
        length_N = np.asarray(lengths.lengths, dtype=np.int64)
        start_N = np.asarray(lengths.host[:-1], dtype=np.int64) + history * np.arange(len(length_N))
        before_H = np.arange(history)
        token_T = np.arange(lengths.total) + history * (1 + np.repeat(np.arange(len(length_N)), length_N))
        self.rows = lengths.total + history * len(length_N)
        self.token_T = upload(torch.from_numpy(token_T), device)
        self.history_NH = upload(torch.from_numpy(start_N[:, None] + before_H), device)
        self.final_NH = upload(torch.from_numpy((start_N + length_N)[:, None] + before_H), device)

    @classmethod
    def of(cls, lengths: CuSeqlens, history: int, device: torch.device) -> _Rows:
        return lengths.table(("conv_rows", history, device), lambda: cls(lengths, history, device))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        initial_NCW: torch.Tensor | None,
        lengths: CuSeqlens,
        activation: str | None,
        with_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        working = accumulation_dtype(x_TC.dtype)
        width = weight_CW.shape[1]
        rows = _Rows.of(lengths, width - 1, x_TC.device)
        x_EC = x_TC.new_zeros(rows.rows, x_TC.shape[1], dtype=working)
        x_EC.index_copy_(0, rows.token_T, x_TC.to(working))
        if initial_NCW is not None:
            x_EC[rows.history_NH] = initial_NCW.mT.to(working)
        tap_WC = weight_CW.to(working).T.contiguous()
        outputs = max(rows.rows - width + 1, 0)
        y_EC = x_EC[width - 1 :] * tap_WC[width - 1]
        for tap in range(width - 1):
            y_EC.addcmul_(x_EC[tap : tap + outputs], tap_WC[tap])
        y_TC = y_EC.index_select(0, rows.token_T - (width - 1))
        if bias_C is not None:
            y_TC += bias_C.to(working)
        state_NCW = x_EC[rows.final_NH].mT.contiguous().to(x_TC.dtype) if with_state else None

        ctx.save_for_backward(x_EC, tap_WC, y_TC if activation == "silu" else None)
        ctx.rows, ctx.dtypes = rows, (x_TC.dtype, weight_CW.dtype)
        ctx.bias_dtype = None if bias_C is None else bias_C.dtype
        ctx.initial_dtype = None if initial_NCW is None else initial_NCW.dtype
        return (F.silu(y_TC) if activation == "silu" else y_TC).to(x_TC.dtype), state_NCW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_TC: torch.Tensor, dstate_NCW: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x_EC, tap_WC, before_silu_TC = ctx.saved_tensors
        rows, width = ctx.rows, tap_WC.shape[0]
        dy = dy_TC.to(x_EC.dtype)
        if before_silu_TC is not None:
            dy = torch.ops.aten.silu_backward(dy, before_silu_TC)
        outputs = max(rows.rows - width + 1, 0)
        dy_EC = dy.new_zeros(outputs, dy.shape[1]).index_copy_(0, rows.token_T - (width - 1), dy)
        dx_EC = torch.zeros_like(x_EC)
        dtap_WC = torch.empty_like(tap_WC)
        for tap in range(width):
            seen = slice(tap, tap + outputs)
            dx_EC[seen].addcmul_(dy_EC, tap_WC[tap])
            dtap_WC[tap] = (dy_EC * x_EC[seen]).sum(0)
        if dstate_NCW is not None:
            dx_EC.index_put_((rows.final_NH,), dstate_NCW.mT.to(dx_EC.dtype), accumulate=True)
        x_dtype, weight_dtype = ctx.dtypes
        dbias = None if ctx.bias_dtype is None else dy.sum(0).to(ctx.bias_dtype)
        dinitial = None
        if ctx.initial_dtype is not None:
            dinitial = dx_EC[rows.history_NH].mT.to(ctx.initial_dtype)
        dx_TC = dx_EC.index_select(0, rows.token_T).to(x_dtype)
        return dx_TC, dtap_WC.T.to(weight_dtype), dbias, dinitial, None, None, None

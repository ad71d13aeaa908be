"""Causal depthwise convolution on CUDA.

T tokens, N sequences, C channels, W taps. Initial states are served by packing them before their sequences:
that costs a copy, on a path that training does not take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend.conv_kernels import conv_backward_kernel, conv_kernel
from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import dense_rows, on_device_of
from relax_kernels.upload import upload

MAX_TAPS = 4
FORWARD = {"L": 16, "B": 256, "num_warps": 4}
BACKWARD = {"L": 128, "B": 512, "UNROLL": 4, "num_warps": 4}


def _ages(lengths: CuSeqlens, device: torch.device) -> torch.Tensor:
    return lengths.table(("triton_ages", device), lambda: upload(lengths.positions("cpu").int(), device))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        lengths: CuSeqlens,
        silu: bool,
    ) -> torch.Tensor:
        x_TC, weight_CW = dense_rows(x_TC), weight_CW.contiguous()
        T, C = x_TC.shape
        y_TC = torch.empty(T, C, dtype=x_TC.dtype, device=x_TC.device)
        ages_T = _ages(lengths, x_TC.device)
        options = {
            "C": C,
            "TAPS": weight_CW.shape[1],
            "HAS_BIAS": bias_C is not None,
            "SILU": silu,
        }
        if T:
            with on_device_of(x_TC):
                conv_kernel[(triton.cdiv(T, FORWARD["L"]) * triton.cdiv(C, FORWARD["B"]),)](
                    x_TC,
                    weight_CW,
                    weight_CW if bias_C is None else bias_C.contiguous(),
                    ages_T,
                    y_TC,
                    T,
                    x_TC.stride(0),
                    **options,
                    **FORWARD,
                )
        ctx.save_for_backward(x_TC, weight_CW, bias_C, ages_T)
        ctx.options = options
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TC, weight_CW, bias_C, ages_T = ctx.saved_tensors
        dy_TC = dense_rows(dy_TC)
        T, C = x_TC.shape
        W = weight_CW.shape[1]
        programs = triton.cdiv(T, BACKWARD["L"])
        dx_TC = torch.empty(T, C, dtype=x_TC.dtype, device=x_TC.device)
        dtaps_P4C = torch.empty(programs, MAX_TAPS, C, dtype=torch.float32, device=x_TC.device)
        dbias_PC = None
        if bias_C is not None:
            dbias_PC = torch.empty(programs, C, dtype=torch.float32, device=x_TC.device)
        if T:
            with on_device_of(x_TC):
                conv_backward_kernel[(programs * triton.cdiv(C, BACKWARD["B"]),)](
                    x_TC,
                    weight_CW,
                    weight_CW if bias_C is None else bias_C.contiguous(),
                    ages_T,
                    dy_TC,
                    dx_TC,
                    dtaps_P4C,
                    dtaps_P4C if dbias_PC is None else dbias_PC,
                    T,
                    x_TC.stride(0),
                    dy_TC.stride(0),
                    **ctx.options,
                    **BACKWARD,
                )
        dweight_CW = dtaps_P4C.sum(0)[:W].flip(0).T.to(weight_CW.dtype)
        dbias_C = None if bias_C is None or dbias_PC is None else dbias_PC.sum(0).to(bias_C.dtype)
        return dx_TC, dweight_CW, dbias_C, None, None


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    cu_seqlens: CuSeqlens,
    activation: str | None,
    initial_state_NCW: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.causal_conv1d`."""
    before = weight_CW.shape[1] - 1
    silu = activation == "silu"
    if initial_state_NCW is None:
        y_TC = apply(_Conv, x_TC, weight_CW, bias_C, cu_seqlens, silu)
        return y_TC, _last_inputs(x_TC, cu_seqlens, before) if output_final_state else None
    extended = CuSeqlens.from_lengths(length + before for length in cu_seqlens.lengths)
    order_E, own_T = _places_with_states(cu_seqlens, before, x_TC.device)
    states = initial_state_NCW.transpose(1, 2).reshape(-1, x_TC.shape[1])
    extended_EC = torch.cat((states, x_TC)).index_select(0, order_E)
    y_EC = apply(_Conv, extended_EC, weight_CW, bias_C, extended, silu)
    final = _last_inputs(extended_EC, extended, before) if output_final_state else None
    return y_EC.index_select(0, own_T), final


def _last_inputs(x_TC: torch.Tensor, lengths: CuSeqlens, count: int) -> torch.Tensor:
    def build() -> torch.Tensor:
        ends_N = np.asarray(lengths.host[1:], dtype=np.int64)
        place_NW = ends_N[:, None] - count + np.arange(count)
        started = place_NW >= np.asarray(lengths.host[:-1], dtype=np.int64)[:, None]
        return upload(torch.from_numpy(np.where(started, place_NW + 1, 0)), x_TC.device)

    place_NW = lengths.table(("triton_last_inputs", count, x_TC.device), build)
    padded = torch.cat((x_TC.new_zeros(1, x_TC.shape[1]), x_TC))
    return padded[place_NW].transpose(1, 2)


def _places_with_states(
    lengths: CuSeqlens, before: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that puts each sequence's states before it, and where its own tokens then lie."""

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        states = len(lengths) * before
        order: list[np.ndarray] = []
        for n, (start, end) in enumerate(zip(lengths.host, lengths.host[1:], strict=False)):
            order.append(np.arange(n * before, (n + 1) * before))
            order.append(np.arange(states + start, states + end))
        order_E = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
        own_T = np.flatnonzero(order_E >= states)
        return upload(torch.from_numpy(order_E), device), upload(torch.from_numpy(own_T), device)

    return lengths.table(("triton_states_first", before, device), build)

"""Causal convolution through fla_npu, with the gradients that its releases lack.

T tokens, N sequences, C channels, W taps. fla_npu wants [T, C], taps as [W, C] and states as [N, W - 1, C].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from relax_npu.operators.backend import has_operator
from relax_npu.operators.typed import apply, split

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens

_PREFILL = 0
_NO_ACTIVATION = 0


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
    """Serve `relax_kernels.causal_conv1d`; silu is torch's, for the backward pass needs its input anyway."""
    dtype = x_TC.dtype
    states_NWC = None if initial_state_NCW is None else initial_state_NCW.transpose(1, 2)
    # fla_npu is not asked about empty sequences; they have no output and keep their state.
    kept = [n for n, length in enumerate(cu_seqlens.lengths) if length]
    starts = [cu_seqlens.host[n] for n in kept] + [cu_seqlens.total]
    given = states_NWC
    if given is not None and len(kept) < len(cu_seqlens):
        given = given[torch.tensor(kept, device=x_TC.device)]
    bias = None if bias_C is None else bias_C.to(dtype)
    y_TC: torch.Tensor = apply(_Conv, x_TC, weight_CW.to(dtype).T, bias, given, starts)
    y_TC = F.silu(y_TC.float()).to(dtype) if activation == "silu" else y_TC
    if not output_final_state:
        return y_TC, None
    width = weight_CW.shape[1]
    return y_TC, last_inputs(x_TC, states_NWC, cu_seqlens, width).transpose(1, 2)


def last_inputs(
    x_TC: torch.Tensor, states_NWC: torch.Tensor | None, cu_seqlens: CuSeqlens, width: int
) -> torch.Tensor:
    """Return the last W - 1 inputs of each sequence, [N, W - 1, C], reaching back into its initial state."""
    sequences, channels = len(cu_seqlens), x_TC.shape[1]
    if states_NWC is None:
        states_NWC = x_TC.new_zeros(sequences, width - 1, channels)

    def rows() -> torch.Tensor:
        before = sequences * (width - 1)
        wanted: list[int] = []
        for n, (start, length) in enumerate(zip(cu_seqlens.host, cu_seqlens.lengths, strict=False)):
            own = [n * (width - 1) + i for i in range(width - 1)]
            own += [before + start + i for i in range(max(0, length - width + 1), length)]
            wanted += own[len(own) - width + 1 :]
        return torch.tensor(wanted, device=x_TC.device)

    index = cu_seqlens.table(("ascend last inputs", width, x_TC.device), rows)
    both = torch.cat((states_NWC.reshape(-1, channels), x_TC))
    return both.index_select(0, index).view(sequences, width - 1, channels)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: torch.Tensor,
        weight_WC: torch.Tensor,
        bias_C: torch.Tensor | None,
        states_NWC: torch.Tensor | None,
        starts: list[int],
    ) -> torch.Tensor:
        x_TC, weight_WC = x_TC.contiguous(), weight_WC.contiguous()
        sequences = len(starts) - 1
        if states_NWC is None:
            kernel_states = x_TC.new_zeros(sequences, len(weight_WC) - 1, x_TC.shape[1])
        else:
            # The kernel may write the states back; ours stay as they are.
            kernel_states = states_NWC.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(x_TC, weight_WC, states_NWC)
        ctx.starts, ctx.has_bias = starts, bias_C is not None
        y_TC: torch.Tensor = torch.ops.npu.npu_causal_conv1d(
            x_TC,
            weight_WC,
            bias_C,
            kernel_states,
            query_start_loc=starts,
            initial_state_mode=None if states_NWC is None else [1] * sequences,
            activation_mode=_NO_ACTIVATION,
            pad_slot_id=-1,
            run_mode=_PREFILL,
        )
        return y_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: torch.Tensor) -> Any:
        x_TC, weight_WC, states_NWC = ctx.saved_tensors
        gradients = _fused_gradients if has_operator("npu_causal_conv1d_bwd") else _torch_gradients
        dx, dweight, dbias, dstates = gradients(x_TC, weight_WC, states_NWC, ctx.starts, dy_TC.contiguous())
        return dx, dweight, dbias if ctx.has_bias else None, None if states_NWC is None else dstates, None


def _fused_gradients(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    states_NWC: torch.Tensor | None,
    starts: list[int],
    dy_TC: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    # The backward kernel's states have W rows, of which the oldest meets no tap.
    whole = None if states_NWC is None else F.pad(states_NWC, (0, 0, 1, 0)).contiguous()
    dx, dweight, dbias, dstates = torch.ops.npu.npu_causal_conv1d_bwd(
        x_TC,
        None,
        weight_WC,
        dy_TC,
        initial_state=whole,
        dht=None,
        query_start_loc=starts,
        activation=_NO_ACTIVATION,
        input_layout="TND",
    )
    return dx, dweight, dbias, dstates[:, 1:]


def _torch_gradients(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    states_NWC: torch.Tensor | None,
    starts: list[int],
    dy_TC: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients for releases of fla_npu without a backward kernel, summed in float32.

    Tap j of W meets the input j - (W - 1) places away. Each sequence is laid behind its W - 1 states, so that
    one shift of the whole row serves all sequences.
    """
    taps = len(weight_WC)
    lengths = [end - start for start, end in pairwise(starts)]
    pad = x_TC.new_zeros(len(lengths), taps - 1, x_TC.shape[1]) if states_NWC is None else states_NWC
    pieces = zip(pad, split(x_TC, lengths), split(dy_TC, lengths), strict=True)
    laid_x, laid_dy = [], []
    for state, x, dy in pieces:
        laid_x += [state.float(), x.float()]
        laid_dy += [torch.zeros_like(state, dtype=torch.float32), dy.float()]
    x_LC, dy_LC = torch.cat(laid_x), torch.cat(laid_dy)
    dx_LC = torch.zeros_like(x_LC)
    dweight = []
    for j, tap_C in enumerate(weight_WC.float()):
        back = taps - 1 - j
        rows = len(x_LC) - back
        dx_LC[:rows] += dy_LC[back:] * tap_C
        dweight.append((dy_LC[back:] * x_LC[:rows]).sum(0))
    parts = split(dx_LC, [n for length in lengths for n in (taps - 1, length)])
    dtype = x_TC.dtype
    return (
        torch.cat(parts[1::2]).to(dtype),
        torch.stack(dweight).to(dtype),
        dy_LC.sum(0).to(dtype),
        torch.stack(parts[0::2]).to(dtype),
    )

"""Attention on CUDA through the flash attention that torch carries (packed sequences, causal from the end);
through cuDNN where that is faster.

T query tokens, S key tokens, N sequences, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend.dense_attention import dense_attention, serves
from relax_kernels.triton_backend.jit import apply

MAX_HEAD_DIM = 256


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        lengths_q: CuSeqlens,
        lengths_k: CuSeqlens,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        limits = (
            lengths_q.on(q_THD.device),
            lengths_k.on(q_THD.device),
            lengths_q.max_length,
            lengths_k.max_length,
        )
        o_THD, lse_HT, seed, _, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_SGD, v_SGD, *limits, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(q_THD, k_SGD, v_SGD, o_THD, lse_HT, seed)
        ctx.options = (limits, causal, scale)
        ctx.set_materialize_grads(False)
        # The library marks a query that sees no key with plus infinity.
        return o_THD, lse_HT.masked_fill(lse_HT == float("inf"), float("-inf")).T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do_THD: torch.Tensor | None, dlse_TH: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_SGD, v_SGD, o_THD, lse_HT, seed = ctx.saved_tensors
        limits, causal, scale = ctx.options
        unused = torch.empty(0, device=q_THD.device)

        def gradients(do: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_backward(
                do.contiguous(),
                q_THD,
                k_SGD,
                v_SGD,
                o_THD,
                lse_HT,
                *limits,
                0.0,
                causal,
                seed,
                unused,
                scale=scale,
            )
            return result

        dq = dk = dv = None
        if do_THD is not None:
            dq, dk, dv = gradients(do_THD)
        if dlse_TH is not None:
            # lse adds scale * dlse_i * P_ij to the gradient of each score: for q the attention over the keys
            # as values, for k what the backward pass gives the values of an output gradient dlse * q.
            dlse_TH1 = dlse_TH.masked_fill(float("inf") == lse_HT.T, 0.0).unsqueeze(-1) * scale
            seen_THD = torch.ops.aten._flash_attention_forward(
                q_THD, k_SGD, k_SGD, *limits, 0.0, causal, False, scale=scale
            )[0]
            more_q = (dlse_TH1 * seen_THD).to(q_THD.dtype)
            more_k = gradients((dlse_TH1 * q_THD).to(q_THD.dtype))[2]
            dq = more_q if dq is None else dq + more_q
            dk = more_k if dk is None else dk + more_k
        return dq, dk, dv, None, None, None, None


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    *,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.attention`."""
    if serves(cu_seqlens_q, cu_seqlens_k, q_THD.shape[-1], causal=causal, lse=return_lse):
        o_THD = dense_attention(q_THD, k_SGD, v_SGD, sequences=len(cu_seqlens_q), scale=scale)
        return o_THD, None
    o_THD, lse_TH = apply(_Attention, q_THD, k_SGD, v_SGD, cu_seqlens_q, cu_seqlens_k, causal, scale)
    return o_THD, lse_TH

"""Packed attention through npu_fusion_attention.

T query tokens, S key tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from relax_npu.operators.typed import apply

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens

_MASK = 2048  # The kernel repeats one mask of this size along the diagonal.
_ALL_KEYS, _CAUSAL_FROM_THE_END = 0, 3
_WIDER = 16


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
    """Serve `relax_kernels.attention`."""
    # The kernel takes where each sequence ends, as numbers of the host, without the leading zero.
    ends = (list(cu_seqlens_q.host[1:]), list(cu_seqlens_k.host[1:]))
    o_THD, lse_TH = apply(_FusionAttention, q_THD, k_SGD, v_SGD, *ends, causal, scale)
    return o_THD, lse_TH if return_lse else None


class _FusionAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        ends_q: list[int],
        ends_k: list[int],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_THD, k_SGD, v_SGD = (x.contiguous() for x in (q_THD, k_SGD, v_SGD))
        o_THD, maximum_TH8, sum_TH8, *_ = torch.ops.npu.npu_fusion_attention(
            q_THD,
            k_SGD,
            v_SGD,
            q_THD.shape[1],
            "TND",
            atten_mask=_mask(q_THD.device) if causal else None,
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=ends_q,
            actual_seq_kvlen=ends_k,
            sparse_mode=_CAUSAL_FROM_THE_END if causal else _ALL_KEYS,
        )
        ctx.save_for_backward(q_THD, k_SGD, v_SGD, o_THD, maximum_TH8, sum_TH8)
        ctx.ends, ctx.causal, ctx.scale = (ends_q, ends_k), causal, scale
        ctx.set_materialize_grads(False)
        return o_THD, maximum_TH8[..., 0] + sum_TH8[..., 0].log()

    @staticmethod
    def backward(ctx: Any, do_THD: torch.Tensor | None, dlse_TH: torch.Tensor | None) -> Any:
        q_THD, k_SGD, v_SGD, o_THD, maximum_TH8, sum_TH8 = ctx.saved_tensors
        do_THD = torch.zeros_like(o_THD) if do_THD is None else do_THD
        head_dim = q_THD.shape[-1]
        tensors = [q_THD, k_SGD, v_SGD, do_THD, o_THD]
        if dlse_TH is not None:
            tensors = _with_lse_gradient(tensors, dlse_TH)
        q, k, v, do, o = (x.contiguous() for x in tensors)
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            do,
            q.shape[1],
            "TND",
            atten_mask=_mask(q.device) if ctx.causal else None,
            softmax_max=maximum_TH8,
            softmax_sum=sum_TH8,
            attention_in=o,
            scale_value=ctx.scale,
            keep_prob=1.0,
            actual_seq_qlen=ctx.ends[0],
            actual_seq_kvlen=ctx.ends[1],
            sparse_mode=_CAUSAL_FROM_THE_END if ctx.causal else _ALL_KEYS,
        )
        return *(x[..., :head_dim] for x in (dq, dk, dv)), None, None, None, None


def _with_lse_gradient(tensors: list[torch.Tensor], dlse_TH: torch.Tensor) -> list[torch.Tensor]:
    """Widen the heads so that the kernel, which takes no gradient of the log-sum-exp, adds it.

    It computes ds = p * (do . v - do . o). With one more feature that is 1 in v, dlse in do and 0 in o, the
    bracket grows by dlse: the gradient of the log-sum-exp by the scores is p.
    """
    wide = [torch.nn.functional.pad(x, (0, _WIDER)) for x in tensors]
    head_dim = tensors[0].shape[-1]
    wide[2][..., head_dim] = 1.0
    wide[3][..., head_dim] = dlse_TH.to(wide[3].dtype)
    return wide


@cache
def _mask(device: torch.device) -> torch.Tensor:
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu_(1)

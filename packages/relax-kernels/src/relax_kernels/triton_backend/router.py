"""The router's choice on CUDA: softmax, top_k experts and their shares in one kernel each way.

T tokens, E experts (W of them with the padding to a power of two), K chosen experts of each token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from relax_kernels.triton_backend.jit import apply, jit
from relax_kernels.triton_backend.launch import on_device_of


@jit
def choose_kernel(
    logits: tl.tensor,
    weight: tl.tensor,
    expert: tl.tensor,
    token_stride: tl.tensor,
    E: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
) -> None:
    """Choose one token's experts, largest logit first, of equal ones the lower index; grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, W)
    logit_E = tl.load(logits + token * token_stride + index, mask=index < E, other=float("-inf"))
    logit_E = logit_E.to(tl.float32)
    largest = tl.max(logit_E, axis=0)
    p_E = tl.where(index < E, tl.exp(logit_E - largest), 0.0)
    free = index < E
    rank_E = tl.full([W], -1, tl.int32)
    for k in tl.static_range(K):
        best = tl.max(tl.where(free, logit_E, float("-inf")), axis=0)
        place = tl.min(tl.where(free & (logit_E == best), index, W), axis=0)
        # Where NaN equals nothing, any free expert will do: the share is NaN.
        place = tl.where(place < W, place, tl.min(tl.where(free, index, W), axis=0))
        rank_E = tl.where(index == place, k, rank_E)
        free = free & (index != place)
    chosen = rank_E >= 0
    total = tl.sum(tl.where(chosen, p_E, 0.0), axis=0) if NORMALISE else tl.sum(p_E, axis=0)
    tl.store(weight + token * K + rank_E, p_E / total, mask=chosen)
    tl.store(expert + token * K + rank_E, index.to(tl.int64), mask=chosen)


@jit
def choose_backward_kernel(
    logits: tl.tensor,
    weight: tl.tensor,
    expert: tl.tensor,
    dweight: tl.tensor,
    dlogits: tl.tensor,
    token_stride: tl.tensor,
    E: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
) -> None:
    """Gradient of one token's logits; grid (T,).

    The shares are a softmax over the chosen experts (NORMALISE) or over all: dlogit = p (dp - sum p dp), with
    dp = 0 where an expert was not chosen.
    """
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, W)
    dp_E = tl.zeros([W], tl.float32)
    p_E = tl.zeros([W], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(expert + token * K + k)
        p_E = tl.where(index == place, tl.load(weight + token * K + k), p_E)
        dp_E = tl.where(index == place, tl.load(dweight + token * K + k).to(tl.float32), dp_E)
    mean = tl.sum(p_E * dp_E, axis=0)
    if not NORMALISE:
        logit_E = tl.load(logits + token * token_stride + index, mask=index < E, other=float("-inf"))
        logit_E = logit_E.to(tl.float32)
        p_E = tl.exp(logit_E - tl.max(logit_E, axis=0))
        p_E = p_E / tl.sum(p_E, axis=0)
    dlogit_E = p_E * (dp_E - mean)
    tl.store(dlogits + token * E + index, dlogit_E.to(dlogits.dtype.element_ty), mask=index < E)


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, top_k: int, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
        tokens, experts = logits_TE.shape
        weight_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
        expert_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
        ctx.options = {
            "E": experts,
            "W": triton.next_power_of_2(experts),
            "K": top_k,
            "NORMALISE": normalise,
            "num_warps": 1,
        }
        if tokens:
            with on_device_of(logits_TE):
                choose_kernel[(tokens,)](logits_TE, weight_TK, expert_TK, logits_TE.stride(0), **ctx.options)
        ctx.mark_non_differentiable(expert_TK)
        ctx.save_for_backward(logits_TE, weight_TK, expert_TK)
        return weight_TK, expert_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweight_TK: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        logits_TE, weight_TK, expert_TK = ctx.saved_tensors
        dlogits_TE = torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)
        if len(logits_TE):
            with on_device_of(logits_TE):
                choose_backward_kernel[(len(logits_TE),)](
                    logits_TE,
                    weight_TK,
                    expert_TK,
                    dweight_TK.contiguous(),
                    dlogits_TE,
                    logits_TE.stride(0),
                    **ctx.options,
                )
        return dlogits_TE, None, None


def router_topk(logits_TE: torch.Tensor, *, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `relax_kernels.router_topk`."""
    result: tuple[torch.Tensor, torch.Tensor] = apply(_Router, logits_TE, top_k, normalise)
    return result

"""Log-probabilities of a head that is not trained: hidden's gradient comes with the forward pass.

T tokens, D hidden, V vocabulary entries of this rank, C of one slice. Where neither the head's weight wants a
gradient nor the entropy is asked for, hidden's is the log-probability's gradient times one number a token:

    d logprob / d hidden = ((1 - p_target) w_target - sum over the others of p_v w_v) / temperature

The sum is gathered slice by slice under the running maximum, as the softmax is: two products of T * D * V
where forward and backward pass take three. The target is left out of it, so that a confident token's
gradient, a small difference, is not lost in the rounding of the weights to hidden's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import dense_rows, on_device_of
from relax_kernels.triton_backend.logprob_kernels import gather_kernel, weigh_kernel
from relax_kernels.triton_backend.logprob_slices import STEP, float32_product, over_ranks, slices_of


class _FixedHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        chunk_tokens: int | None,
        group: ProcessGroup | None,
        reduce_hidden_grad: bool,
    ) -> torch.Tensor:
        hidden_TD, weight_VD = hidden_TD.contiguous(), dense_rows(weight_VD)
        (T, _), V = hidden_TD.shape, weight_VD.shape[0]
        slices = slices_of(T, V, chunk_tokens)
        offset = 0 if group is None else group.rank() * V
        sum_TD = torch.empty(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        total_T, chosen_T, unused_T = sum_TD.new_zeros((3, T)).unbind()
        top_T = sum_TD.new_full((T,), float("-inf"))
        buffer = sum_TD.new_empty(T * slices[0][1])
        weights = torch.empty(T * slices[0][1], dtype=hidden_TD.dtype, device=hidden_TD.device)
        with on_device_of(hidden_TD):
            for first, entries in slices:
                slice_CD = weight_VD[first : first + entries]
                logits_TC = buffer[: T * entries].view(T, entries)
                weights_TC = weights[: T * entries].view(T, entries)
                float32_product(hidden_TD, slice_CD.T, logits_TC)
                before_T = top_T.clone()
                gather_kernel[(T,)](
                    logits_TC, target_T, top_T, total_T, unused_T, chosen_T, entries, offset + first, entries,
                    1.0 / temperature, W=STEP, ENTROPY=False, num_warps=8,
                )  # fmt: skip
                weigh_kernel[(T, triton.cdiv(entries, STEP))](
                    logits_TC, target_T, top_T, weights_TC, entries, offset + first, entries, entries,
                    1.0 / temperature, W=STEP, num_warps=8,
                )  # fmt: skip
                if first > 0:
                    sum_TD.mul_((before_T - top_T).exp_()[:, None])
                float32_product(weights_TC, slice_CD, sum_TD, accumulate=first > 0)
        own_top_T = top_T
        if group is not None:
            top_T, total_T, chosen_T, _ = over_ranks(group, top_T, total_T, chosen_T, unused_T)
        logprob_T: torch.Tensor = chosen_T - top_T - total_T.log()
        gradient_TD = sum_TD.mul_((own_top_T - top_T).exp_().div_(total_T).neg_()[:, None])
        place_T = target_T - offset
        here_T = (place_T >= 0) & (place_T < V)
        share_T = torch.where(here_T, -torch.expm1(logprob_T), 0.0)
        gradient_TD.addcmul_(weight_VD[place_T.clamp(0, V - 1)].float(), share_T[:, None])
        gradient_TD.mul_(1.0 / temperature)
        if group is not None and reduce_hidden_grad:
            dist.all_reduce(gradient_TD, group=group)
        ctx.save_for_backward(gradient_TD)
        ctx.dtype = hidden_TD.dtype
        return logprob_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprob_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_TD,) = ctx.saved_tensors
        return (gradient_TD * dlogprob_T[:, None]).to(ctx.dtype), None, None, None, None, None, None


def fixed_head_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None,
    process_group: ProcessGroup | None,
    reduce_hidden_grad: bool,
) -> torch.Tensor:
    """Log-probabilities [T] of targets, all of which are there, with a gradient to hidden alone."""
    settings = (temperature, chunk_tokens, process_group, reduce_hidden_grad)
    logprob_T: torch.Tensor = apply(_FixedHeadLogprob, hidden_TD, weight_VD, target_T, *settings)
    return logprob_T

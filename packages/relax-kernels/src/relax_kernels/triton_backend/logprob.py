"""Log-probabilities straight from hidden states on CUDA, in slices of the vocabulary.

T tokens, D hidden, V vocabulary entries of this rank, C of one slice, K largest ones. The products are the
BLAS library's; between them run kernels over the float32 logits of one slice. Slices of the vocabulary, not
of the tokens: the weight's gradient is then complete after one product, in full precision, and what adds up
over slices is hidden's, which is small. The forward pass keeps one number a token (two with the entropy); the
backward pass computes the logits again: four products of T * D * V in all, or two for a weight that wants no
gradient (`logprob_fixed.py`). The largest entries are torch's topk of each slice, merged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from relax_kernels.top_k import largest, largest_over_ranks
from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import dense_rows, on_device_of
from relax_kernels.triton_backend.logprob_fixed import fixed_head_logprob
from relax_kernels.triton_backend.logprob_kernels import gather_kernel, spread_kernel
from relax_kernels.triton_backend.logprob_slices import STEP, float32_product, over_ranks, slices_of


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        top_k: int | None,
        chunk_tokens: int | None,
        group: ProcessGroup | None,
        reduce_hidden_grad: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD = hidden_TD.contiguous(), dense_rows(weight_VD)
        (T, _), V = hidden_TD.shape, weight_VD.shape[0]
        slices = slices_of(T, V, chunk_tokens)
        offset = 0 if group is None else group.rank() * V

        def floats(fill: float) -> torch.Tensor:
            return torch.full((T,), fill, dtype=torch.float32, device=hidden_TD.device)

        top_T, total_T, chosen_T, weighted_T = floats(float("-inf")), floats(0), floats(0), floats(0)
        largest_TK = hidden_TD.new_empty(T, 0, dtype=torch.float32)
        index_TK = target_T.new_empty(T, 0)
        buffer = torch.empty(T * slices[0][1], dtype=torch.float32, device=hidden_TD.device)
        with on_device_of(hidden_TD):
            for first, entries in slices:
                logits_TC = buffer[: T * entries].view(T, entries)
                float32_product(hidden_TD, weight_VD[first : first + entries].T, logits_TC)
                gather_kernel[(T,)](
                    logits_TC,
                    target_T,
                    top_T,
                    total_T,
                    weighted_T,
                    chosen_T,
                    entries,
                    offset + first,
                    entries,
                    1.0 / temperature,
                    W=STEP,
                    ENTROPY=with_entropy,
                    num_warps=8,
                )
                if top_k:
                    value_TK, place_TK = torch.topk(logits_TC, min(top_k, entries))
                    index_TK = torch.cat((index_TK, place_TK + (offset + first)), 1)
                    largest_TK, index_TK = largest(torch.cat((largest_TK, value_TK), 1), index_TK, top_k)
        if group is not None:
            top_T, total_T, chosen_T, weighted_T = over_ranks(group, top_T, total_T, chosen_T, weighted_T)
        rest_T = total_T.log()
        lse_T = top_T + rest_T
        # In this order a token that is nearly certain keeps its digits.
        logprob_T = chosen_T - top_T - rest_T
        entropy_T = rest_T - weighted_T / total_T if with_entropy else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, lse_T, entropy_T)
        ctx.options = (temperature, slices, offset, group if reduce_hidden_grad else None)
        ctx.set_materialize_grads(False)
        if not top_k:
            return logprob_T, entropy_T, None, None
        if group is not None:
            largest_TK, index_TK = largest_over_ranks(largest_TK, index_TK, top_k, group)
        topk_TK = largest_TK / temperature - top_T[:, None] - rest_T[:, None]
        ctx.mark_non_differentiable(topk_TK, index_TK)
        return logprob_T, entropy_T, topk_TK, index_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogprob_T: torch.Tensor | None, dentropy_T: torch.Tensor | None, *_topk: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, lse_T, entropy_T = ctx.saved_tensors
        temperature, slices, offset, group = ctx.options
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        T, widest = hidden_TD.shape[0], slices[0][1]
        dlogprob_T = torch.zeros_like(lse_T) if dlogprob_T is None else dlogprob_T.contiguous()
        dhidden_TD = torch.empty(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        dweight_VD = torch.empty_like(weight_VD) if needs_weight else None
        buffer = torch.empty(T * widest, dtype=torch.float32, device=hidden_TD.device)
        dbuffer = torch.empty(T * widest, dtype=hidden_TD.dtype, device=hidden_TD.device)
        with on_device_of(hidden_TD):
            for first, entries in slices:
                slice_CD = weight_VD[first : first + entries]
                logits_TC = buffer[: T * entries].view(T, entries)
                dlogits_TC = dbuffer[: T * entries].view(T, entries)
                float32_product(hidden_TD, slice_CD.T, logits_TC)
                spread_kernel[(T, triton.cdiv(entries, STEP))](
                    logits_TC,
                    target_T,
                    lse_T,
                    lse_T if dentropy_T is None else entropy_T,
                    dlogprob_T,
                    dlogprob_T if dentropy_T is None else dentropy_T.contiguous(),
                    dlogits_TC,
                    entries,
                    offset + first,
                    entries,
                    entries,
                    1.0 / temperature,
                    W=STEP,
                    ENTROPY=dentropy_T is not None,
                    num_warps=8,
                )
                if needs_hidden:
                    float32_product(dlogits_TC, slice_CD, dhidden_TD, accumulate=first > 0)
                if dweight_VD is not None:
                    torch.mm(dlogits_TC.T, hidden_TD, out=dweight_VD[first : first + entries])
        if not needs_hidden:
            return None, dweight_VD, None, None, None, None, None, None, None
        if group is not None:
            dist.all_reduce(dhidden_TD, group=group)
        return dhidden_TD.to(hidden_TD.dtype), dweight_VD, None, None, None, None, None, None, None


def linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    top_k: int | None,
    all_targets: bool,
    chunk_tokens: int | None,
    process_group: ProcessGroup | None,
    reduce_hidden_grad: bool,
) -> tuple[torch.Tensor | None, ...]:
    """See `relax_kernels.linear_logprob`."""
    tokens = target_T.numel()
    if not all_targets:
        place_S = torch.nonzero(target_T >= 0).squeeze(1)
    skips = not all_targets and place_S.numel() < tokens
    if skips:
        hidden_TD, target_T = hidden_TD.index_select(0, place_S), target_T.index_select(0, place_S)
    if not target_T.numel():
        # Nothing to compute, but both inputs keep their place in the graph.
        nothing = (hidden_TD.sum() + weight_VD[:0].sum()).float()
        zeros_T = nothing.expand(tokens)
        shape = (tokens, top_k or 0)
        ids = (nothing.new_zeros(shape), target_T.new_full(shape, -1)) if top_k else (None, None)
        return zeros_T, zeros_T if with_entropy else None, *ids
    fixed = hidden_TD.requires_grad and not weight_VD.requires_grad and torch.is_grad_enabled()
    results: tuple[torch.Tensor | None, ...]
    if fixed and not with_entropy and not top_k:
        logprob_T = fixed_head_logprob(
            hidden_TD,
            weight_VD,
            target_T,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            process_group=process_group,
            reduce_hidden_grad=reduce_hidden_grad,
        )
        results = (logprob_T, None, None, None)
    else:
        results = apply(
            _LinearLogprob,
            hidden_TD,
            weight_VD,
            target_T,
            temperature,
            with_entropy,
            top_k,
            chunk_tokens,
            process_group,
            reduce_hidden_grad,
        )
    if skips:
        # Where there is no target: an index of -1, zeros elsewhere.
        results = tuple(
            None
            if x is None
            else x.new_full((tokens, *x.shape[1:]), 0 if x.is_floating_point() else -1).index_copy(
                0, place_S, x
            )
            for x in results
        )
    return results

"""Log-probabilities from hidden states over chunks of tokens, with a hand-written backward pass.

T tokens, B tokens of a chunk that have a target, D hidden, V vocabulary entries of this rank, K largest ones.

With z = hidden @ weight^T / temperature, L = log sum exp z, p = exp(z - L): logprob = z[target] - L and
entropy H = L - sum p z. Their gradients by z are onehot - p and -p (z - L + H).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from relax_kernels.top_k import largest_over_ranks
from relax_kernels.torch_backend.typed import accumulation_dtype, apply, on_host

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk take at most this much, if the caller does not choose the chunk."""


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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See `relax_kernels.linear_logprob`."""
    if chunk_tokens is None:
        row_bytes = weight_VD.shape[0] * accumulation_dtype(hidden_TD.dtype).itemsize
        chunk_tokens = max(1, CHUNK_BYTES // row_bytes)
    masked = not all_targets and not on_host(target_T)
    if masked:
        # Which rows have a target is not known without waiting for the device: all are computed.
        counted_T = target_T >= 0
        counted_T1 = counted_T.unsqueeze(1)
        hidden_TD, target_T = torch.where(counted_T1, hidden_TD, 0.0), target_T.clamp(min=0)
    logprob_T, entropy_T, topk_TK, index_TK = apply(
        _LinearLogProb,
        hidden_TD,
        weight_VD,
        target_T,
        temperature,
        with_entropy,
        top_k or 0,
        chunk_tokens,
        process_group,
        reduce_hidden_grad,
    )
    if masked:
        logprob_T, entropy_T = (torch.where(counted_T, x_T, 0.0) for x_T in (logprob_T, entropy_T))
        topk_TK, index_TK = torch.where(counted_T1, topk_TK, 0.0), torch.where(counted_T1, index_TK, -1)
    largest = (None, None) if top_k is None else (topk_TK, index_TK)
    return logprob_T, entropy_T if with_entropy else None, *largest


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        top_k: int,
        chunk_tokens: int,
        group: ProcessGroup | None,
        reduce_hidden_grad: bool,
    ) -> tuple[torch.Tensor, ...]:
        working = accumulation_dtype(hidden_TD.dtype)
        first = 0 if group is None else group.rank() * weight_VD.shape[0]
        logprob_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=working)
        lse_T, entropy_T = torch.zeros_like(logprob_T), torch.zeros_like(logprob_T)
        weight, chunks = weight_VD.to(working), _chunks(target_T, chunk_tokens)
        topk_TK = logprob_T.new_zeros(len(target_T), min(top_k, len(weight)))
        index_TK = torch.full_like(topk_TK, -1, dtype=torch.int64)
        logp_BV = None
        for row_B in chunks:
            z_BV = _logits(hidden_TD[row_B], weight, temperature)
            local_B1, here_B1 = _local_targets(target_T[row_B], first, weight.shape[0])
            if group is None:
                logp_BV = torch.log_softmax(z_BV, -1)
                logprob_T[row_B] = logp_BV.gather(1, local_B1)[:, 0]
                lse_T[row_B] = z_BV.gather(1, local_B1)[:, 0] - logprob_T[row_B]
            else:
                logp_BV, lse_T[row_B] = _log_softmax(z_BV, group)
                logprob_T[row_B] = _sum_over((logp_BV.gather(1, local_B1) * here_B1)[:, 0], group)
            if with_entropy:
                entropy_T[row_B] = -_sum_over((logp_BV.exp() * logp_BV).sum(-1), group)
            if top_k:
                topk_TK[row_B], local_BK = torch.topk(logp_BV, topk_TK.shape[1])
                index_TK[row_B] = local_BK + first
        if top_k and group is not None:
            topk_TK, index_TK = largest_over_ranks(topk_TK, index_TK, top_k, group)
        # What fits into one chunk need not be computed again.
        kept = logp_BV if len(chunks) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, lse_T, entropy_T, kept)
        ctx.settings = (temperature, with_entropy, chunk_tokens, group, reduce_hidden_grad, first)
        ctx.mark_non_differentiable(topk_TK, index_TK, *(() if with_entropy else (entropy_T,)))
        return logprob_T, entropy_T, topk_TK, index_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogprob_T: torch.Tensor, dentropy_T: torch.Tensor, *_topk: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, lse_T, entropy_T, kept = ctx.saved_tensors
        temperature, with_entropy, chunk_tokens, group, reduce_hidden_grad, first = ctx.settings
        working = lse_T.dtype
        weight = weight_VD.to(working)
        dhidden = torch.zeros_like(hidden_TD, dtype=working) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight_VD, dtype=working) if ctx.needs_input_grad[1] else None
        for row_B in _chunks(target_T, chunk_tokens):
            hidden_BD = hidden_TD[row_B].to(working)
            logp_BV = kept
            if logp_BV is None:
                logp_BV = _logits(hidden_BD, weight, temperature).sub_(lse_T[row_B, None])
            dlogprob_B1 = dlogprob_T[row_B, None] / temperature
            dz_BV = logp_BV.exp()
            if with_entropy:
                slope_BV = (logp_BV + entropy_T[row_B, None]).mul_(dentropy_T[row_B, None] / temperature)
                dz_BV.mul_(slope_BV.add_(dlogprob_B1)).neg_()
            else:
                dz_BV.mul_(-dlogprob_B1)
            local_B1, here_B1 = _local_targets(target_T[row_B], first, weight.shape[0])
            dz_BV.scatter_add_(1, local_B1, dlogprob_B1 * here_B1)
            if dhidden is not None and isinstance(row_B, slice):
                torch.mm(dz_BV, weight, out=dhidden[row_B])
            elif dhidden is not None:
                dhidden[row_B] = dz_BV @ weight
            if dweight is not None:
                dweight.addmm_(dz_BV.T, hidden_BD)
        if dhidden is not None:
            dhidden = _sum_over(dhidden, group if reduce_hidden_grad else None).to(hidden_TD.dtype)
        if dweight is not None:
            dweight = dweight.to(weight_VD.dtype)
        return dhidden, dweight, None, None, None, None, None, None, None


def _chunks(target_T: torch.Tensor, chunk_tokens: int) -> list[slice | torch.Tensor]:
    """Rows that have a target, a chunk at a time: as slices if all have one, as on a device, else as
    indices."""
    rows = (target_T >= 0).nonzero()[:, 0] if on_host(target_T) else target_T
    starts = range(0, len(rows), chunk_tokens)
    if len(rows) == len(target_T):
        return [slice(start, start + chunk_tokens) for start in starts]
    return [rows[start : start + chunk_tokens] for start in starts]


def _logits(hidden_BD: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    z_BV = hidden_BD.to(weight.dtype) @ weight.T
    return z_BV if temperature == 1.0 else z_BV.div_(temperature)


def _local_targets(target_B: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of the target in this rank's weight (clamped into it), and whether it is there; both [B, 1]."""
    local_B1 = (target_B - first)[:, None]
    return local_B1.clamp(0, size - 1), (local_B1 >= 0) & (local_B1 < size)


def _log_softmax(z_BV: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """log p [B, V], in place of z, and log sum exp z [B].

    The largest logit is taken off first: of a token that is nearly certain, log p would be lost in the
    rounding of z - log sum exp z, and 1 - p with it.
    """
    largest_B = z_BV.amax(-1)
    dist.all_reduce(largest_B, op=dist.ReduceOp.MAX, group=group)
    z_BV.sub_(largest_B[:, None])
    rest_B = _sum_over(z_BV.exp().sum(-1), group).log()
    return z_BV.sub_(rest_B[:, None]), largest_B + rest_B


def _sum_over(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x

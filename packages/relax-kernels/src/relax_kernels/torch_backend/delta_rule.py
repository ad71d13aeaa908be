"""Gated delta rule in chunks, all sequences and chunks at once, with a hand-written backward pass.

T tokens, N sequences, M chunks, C (and c) tokens of a chunk, H query/key heads, R value heads per key head,
U = H * R value heads, K key dim, V value dim.

Within a chunk let G = cumsum(g) and D[i, j] = exp(G_i - G_j) for j <= i. The chunk's updates satisfy, with S the state
before it, (I + A) X = beta (v - exp(G) k S) where A = strictly lower part of beta_i (k_i . k_j) D. Hence
X = P - W S with P = (I + A)^-1 (beta v), W = (I + A)^-1 (beta exp(G) k), and

    o = scale exp(G) q S + lower(scale q k^T * D) X,      S' = exp(G_C) S + (exp(G_C - G) k)^T X

(Yang et al., arXiv 2406.06484 and 2412.06464). Only the two lines with S run chunk after chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend.chunks import ChunkGrid
from relax_kernels.torch_backend.delta_step import L2_EPS
from relax_kernels.torch_backend.dtypes import accumulation_dtype


def chunk_length(lengths: CuSeqlens) -> int:
    """Choose tokens per chunk: short sequences want short chunks, or most of the grid is empty."""
    return 16 if lengths.max_length <= 16 else 32


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    *,
    cu_seqlens: CuSeqlens,
    initial_state_NUKV: torch.Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.gated_delta_rule`."""
    grid = ChunkGrid.of(cu_seqlens, chunk_length(cu_seqlens), q_THK.device)
    o_TUV, state_NUKV = _ChunkedDeltaRule.apply(
        q_THK, k_THK, v_TUV, g_TU, beta_TU, initial_state_NUKV, grid, scale, qk_l2norm
    )
    return o_TUV, state_NUKV if output_final_state else None


class _ChunkedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TUV: torch.Tensor,
        g_TU: torch.Tensor,
        beta_TU: torch.Tensor,
        initial_NUKV: torch.Tensor | None,
        grid: ChunkGrid,
        scale: float,
        l2norm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        working = accumulation_dtype(q_THK.dtype)
        q_MHCK, k_MHCK, v_MUCV = (_spread(x, grid, working) for x in (q_THK, k_THK, v_TUV))
        beta_MUC, g_MUC = _spread(beta_TU, grid, working), _spread(g_TU, grid, working)
        q_norm = k_norm = None
        if l2norm:
            q_norm, k_norm = _inverse_norm(q_MHCK), _inverse_norm(k_MHCK)
            q_MHCK, k_MHCK = q_MHCK * q_norm, k_MHCK * k_norm
        q_MHCK = q_MHCK * scale
        group = v_MUCV.shape[1] // k_MHCK.shape[1]

        G_MUC = g_MUC.cumsum(-1)
        D_MUCc = _decays(G_MUC)
        eG_MUC1 = G_MUC.exp().unsqueeze(-1)
        key_MUCK, query_MUCK = _per_value_head(k_MHCK, group), _per_value_head(q_MHCK, group)
        scores_MUCc = _per_value_head(_mm(q_MHCK, k_MHCK.mT), group) * D_MUCc
        A_MUCc = _per_value_head(_mm(k_MHCK, k_MHCK.mT), group) * D_MUCc * beta_MUC.unsqueeze(-1)
        right = torch.cat((v_MUCV, key_MUCK * eG_MUC1), -1) * beta_MUC.unsqueeze(-1)
        PW = _solve_unit_lower(A_MUCc, right)
        P_MUCV, W_MUCK = PW.split((v_MUCV.shape[-1], k_MHCK.shape[-1]), -1)

        last_MU11 = G_MUC[..., -1:, None]
        k_out = key_MUCK * (last_MU11 - G_MUC.unsqueeze(-1)).exp()
        states, X_MUCV, final = _run_states(grid, P_MUCV, W_MUCK, k_out, last_MU11.exp(), initial_NUKV)
        o_MUCV = _mm(query_MUCK * eG_MUC1, states) + _mm(scores_MUCc, X_MUCV)

        ctx.save_for_backward(
            q_MHCK, k_MHCK, v_MUCV, beta_MUC, G_MUC, q_norm, k_norm, A_MUCc, PW, states, X_MUCV
        )
        ctx.grid, ctx.scale, ctx.group, ctx.has_initial = grid, scale, group, initial_NUKV is not None
        ctx.dtypes = tuple(x.dtype for x in (q_THK, k_THK, v_TUV, g_TU, beta_TU))
        ctx.initial_dtype = None if initial_NUKV is None else initial_NUKV.dtype
        return _collect(o_MUCV, grid).to(q_THK.dtype), final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do_TUV: torch.Tensor, dfinal_NUKV: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, beta, G, q_norm, k_norm, A, PW, states, X = ctx.saved_tensors
        grid, group = ctx.grid, ctx.group
        P, W = PW.split((v.shape[-1], k.shape[-1]), -1)
        do = _spread(do_TUV, grid, q.dtype)
        query, key = _per_value_head(q, group), _per_value_head(k, group)
        D, eG = _decays(G), G.exp().unsqueeze(-1)
        beta1, last = beta.unsqueeze(-1), G[..., -1:, None]
        to_end = (last - G.unsqueeze(-1)).exp()
        qk, kk = _mm(q, k.mT), _mm(k, k.mT)

        # Chunk after chunk, from the last: dX and the gradient of the state after each chunk.
        dX, dS, dinitial = _run_states_back(
            grid,
            _mm((_per_value_head(qk, group) * D).mT, do),
            _mm((query * eG).mT, do),
            W,
            key * to_end,
            last.exp(),
            dfinal_NUKV,
        )

        # All chunks at once.
        dright = _solve_unit_lower(A.mT, torch.cat((dX, -_mm(dX, states.mT)), -1), upper=True)
        dright_v, dright_k = dright.split((v.shape[-1], k.shape[-1]), -1)
        dA_D = _mm(dright, PW.mT).neg_().tril_(-1).mul_(D)
        dscores_D = _mm(do, X.mT).mul_(D)
        dbeta = (dA_D * _per_value_head(kk, group)).sum(-1)
        exchange = dA_D * beta1 * _per_value_head(kk, group) + dscores_D * _per_value_head(qk, group)
        dG = exchange.sum(-1) - exchange.sum(-2)

        dq_in, dk_out, dk_in = _mm(do, states.mT) * eG, _mm(X, dS.mT) * to_end, dright_k * eG
        dk_in_key = (dk_in * key).sum(-1)
        dk_out_key = (dk_out * key).sum(-1)
        dbeta += (dright_v * v).sum(-1) + dk_in_key
        dG += (dq_in * query).sum(-1) + dk_in_key * beta - dk_out_key
        dG[..., -1] += dk_out_key.sum(-1) + (states * dS).sum((-1, -2)) * last.exp()[..., 0, 0]
        dv = dright_v * beta1
        dqk, dkk = _per_key_head(dscores_D, group), _per_key_head(dA_D * beta1, group)
        dq = (_mm(dqk, k) + _per_key_head(dq_in, group)) * ctx.scale
        dk = _mm(dqk.mT, q) + _mm(dkk + dkk.mT, k) + _per_key_head(dk_in * beta1 + dk_out, group)
        if q_norm is not None:
            dq = _inverse_norm_back(dq, q / ctx.scale, q_norm)
            dk = _inverse_norm_back(dk, k, k_norm)
        dg = dG.flip(-1).cumsum(-1).flip(-1)
        grads = [
            _collect(dx, grid).to(dtype)
            for dx, dtype in zip((dq, dk, dv, dg, dbeta), ctx.dtypes, strict=True)
        ]
        dinitial = dinitial.to(ctx.initial_dtype) if ctx.has_initial else None
        return (*grads, dinitial, None, None, None)


def _spread(x_T: torch.Tensor, grid: ChunkGrid, dtype: torch.dtype) -> torch.Tensor:
    """[T, heads, ...] to [M, heads, C, ...]."""
    return grid.spread(x_T.to(dtype)).transpose(1, 2).contiguous()


def _collect(x_M: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """[M, heads, C, ...] to [T, heads, ...]."""
    return grid.collect(x_M.transpose(1, 2))


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _per_value_head(x_MH: torch.Tensor, group: int) -> torch.Tensor:
    return x_MH if group == 1 else x_MH.repeat_interleave(group, dim=1)


def _per_key_head(x_MU: torch.Tensor, group: int) -> torch.Tensor:
    return x_MU if group == 1 else x_MU.unflatten(1, (-1, group)).sum(2)


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _inverse_norm_back(dy: torch.Tensor, y: torch.Tensor, inverse_norm: torch.Tensor) -> torch.Tensor:
    return (dy - y * (y * dy).sum(-1, keepdim=True)) * inverse_norm


def _decays(G_MUC: torch.Tensor) -> torch.Tensor:
    """exp(G_i - G_j) for j <= i, else 0; the mask comes before exp, which would overflow above the diagonal."""
    return (G_MUC.unsqueeze(-1) - G_MUC.unsqueeze(-2)).tril_().exp_().tril_()


def _solve_unit_lower(A: torch.Tensor, right: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Solve (I + strict triangle of A) x = right."""
    return torch.linalg.solve_triangular(A, right, upper=upper, unitriangular=True)


def _run_states(
    grid: ChunkGrid,
    P: torch.Tensor,
    W: torch.Tensor,
    k_out: torch.Tensor,
    decay_MU11: torch.Tensor,
    initial_NUKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the state before each chunk, each chunk's updates X, and each sequence's final state."""
    U, K, V = P.shape[1], W.shape[-1], P.shape[-1]
    N = len(grid.rank_order_N)
    if initial_NUKV is None:
        running = P.new_zeros(N, U, K, V)
    else:
        running = initial_NUKV.to(P.dtype)[grid.rank_order_N]
    states, X = P.new_empty(grid.chunks, U, K, V), torch.empty_like(P)
    for start, count in zip(grid.starts, grid.counts, strict=True):
        now = slice(start, start + count)
        before = running[:count]
        states[now] = before
        X[now] = P[now] - _mm(W[now], before)
        running[:count] = before * decay_MU11[now] + _mm(k_out[now].mT, X[now])
    return states, X, torch.empty_like(running).index_copy_(0, grid.rank_order_N, running)


def _run_states_back(
    grid: ChunkGrid,
    dX: torch.Tensor,
    dstate_within: torch.Tensor,
    W: torch.Tensor,
    k_out: torch.Tensor,
    decay_MU11: torch.Tensor,
    dfinal_NUKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dX complete, the gradient of the state after each chunk, and that of the initial states."""
    running = dfinal_NUKV.to(dX.dtype)[grid.rank_order_N]
    dafter = torch.empty_like(dstate_within)
    for start, count in zip(reversed(grid.starts), reversed(grid.counts), strict=True):
        now = slice(start, start + count)
        after = running[:count]
        dafter[now] = after
        dX[now] += _mm(k_out[now], after)
        running[:count] = dstate_within[now] + after * decay_MU11[now] - _mm(W[now].mT, dX[now])
    return dX, dafter, torch.empty_like(running).index_copy_(0, grid.rank_order_N, running)

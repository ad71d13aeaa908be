"""Gated delta rule over one grid of chunks: forward and hand-written backward.

M chunks, C (and c) tokens of a chunk, N sequences, H query/key heads, U value heads, K key dim, V value dim.

Within a chunk let G = cumsum(g), D[i, j] = exp(G_i - G_j) for j <= i, and S the state before the chunk. The
values written at its tokens, X, satisfy (I + A) X = beta d, where d = v - exp(G) (k S) and A is the strictly
lower part of beta_i (k_i . k_j) D[i, j]. With inverse = (I + A)^-1:

    X = inverse (beta d),   o = exp(G) (q S) + (q k^T * D) X,   S' = exp(G_C) S + k^T (exp(G_C - G) X)

(Yang et al., arXiv 2406.06484 and 2412.06464.) What contains S runs chunk after chunk, all sequences at once;
the rest runs for all chunks at once. Backward: with Z = inverse^T dX, dd = beta Z and dA = -Z X^T.

Of what reaches from token j (or S) to token i (or S'), the gradient of g_t takes what passes it: j < t <= i.
It is summed as that, not as differences of sums: little passes a gate that closes, and the differences would
leave the rounding of all that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from relax_kernels.torch_backend.chunks import ChunkGrid


class ChunkInputs(NamedTuple):
    """What enters a grid; padding is 0."""

    q_MHCK: torch.Tensor
    """Normalised and scaled."""
    k_MHCK: torch.Tensor
    v_MUCV: torch.Tensor
    G_MUC: torch.Tensor
    """Sum of g from the start of the chunk."""
    G_rest_MUC: torch.Tensor
    """What the dtype of that sum cannot hold of it."""
    beta_MUC: torch.Tensor


class KeptChunks(NamedTuple):
    """What the backward pass of a grid needs besides the inputs."""

    inverse_MUCc: torch.Tensor
    d_MUCV: torch.Tensor
    X_MUCV: torch.Tensor
    states_MUKV: torch.Tensor | None
    """State before each chunk, without the first chunks if those start from 0; None if no chunk has one."""


@dataclass(frozen=True)
class ChunkGradients:
    """Gradients of the inputs, dinitial by rank (None if there was no initial state)."""

    dq_MHCK: torch.Tensor
    dk_MHCK: torch.Tensor
    dv_MUCV: torch.Tensor
    dg_MUC: torch.Tensor
    dbeta_MUC: torch.Tensor
    dinitial_NUKV: torch.Tensor | None


@dataclass(frozen=True)
class _Step:
    """The chunks of one step of the recurrence."""

    now: slice
    """Among the M chunks."""
    saved: slice | None
    """Among the saved states; None if these chunks start from 0."""
    count: int
    going_on: int
    """How many of them (the first) pass their state on."""

    @property
    def passing(self) -> slice:
        """Those that pass their state on, among the M chunks."""
        return slice(self.now.start, self.now.start + self.going_on)


def _steps(grid: ChunkGrid, from_zero: bool, with_final: bool) -> list[_Step]:
    lead = grid.counts[0] if from_zero else 0
    steps = []
    for i, (start, count) in enumerate(zip(grid.starts, grid.counts, strict=True)):
        following = grid.counts[i + 1] if i + 1 < len(grid.counts) else 0
        saved = None if i == 0 and from_zero else slice(start - lead, start - lead + count)
        steps.append(_Step(slice(start, start + count), saved, count, count if with_final else following))
    return steps


def forward(
    grid: ChunkGrid, x: ChunkInputs, initial_NUKV: torch.Tensor | None, with_final: bool
) -> tuple[torch.Tensor, torch.Tensor, KeptChunks]:
    """Return o_MUCV, the states left running (final only with_final) and what to keep; states by rank."""
    M, U, _, V = x.v_MUCV.shape
    K = x.k_MHCK.shape[-1]
    q, k = _per_value_head(x.q_MHCK, U), _per_value_head(x.k_MHCK, U)
    D = _decays(x)
    scores = _per_value_head(_mm(x.q_MHCK, x.k_MHCK.mT), U) * D
    A = (_per_value_head(_mm(x.k_MHCK, x.k_MHCK.mT), U) * D).mul_(x.beta_MUC.unsqueeze(-1))
    inverse = _inverse_of_unit_lower(A)
    writing = inverse * x.beta_MUC.unsqueeze(-2)

    steps = _steps(grid, initial_NUKV is None, with_final)
    stateless = len(steps) == 1 and initial_NUKV is None
    if stateless:
        d, X = x.v_MUCV, _mm(writing, x.v_MUCV)
        o, states = _mm(scores, X), None
    else:
        d, X, o = torch.empty_like(x.v_MUCV), torch.empty_like(x.v_MUCV), torch.empty_like(x.v_MUCV)
        states = d.new_empty(M if initial_NUKV is not None else M - grid.counts[0], U, K, V)
    to_end, last, eG = _to_end(x), _last(x.G_MUC), x.G_MUC.exp().unsqueeze(-1)
    running = d.new_zeros(len(grid.sequence_N), U, K, V) if initial_NUKV is None else initial_NUKV.clone()
    for step in steps:
        now, passing = step.now, step.passing
        if states is not None:
            if step.saved is None:
                d[now] = x.v_MUCV[now]
                o[now] = 0.0
            else:
                before = states[step.saved]
                before.copy_(running[: step.count])
                torch.addcmul(x.v_MUCV[now], eG[now], _mm(k[now], before), value=-1, out=d[now])
                torch.mul(eG[now], _mm(q[now], before), out=o[now])
            X[now] = _mm(writing[now], d[now])
        if step.going_on:
            after = running[: step.going_on]
            after.mul_(last[passing])
            after.add_(_mm(k[passing].mT, X[passing] * to_end[passing]))
    if states is not None:
        o += _mm(scores, X)
    return o, running, KeptChunks(inverse, d, X, states)


def backward(
    grid: ChunkGrid,
    x: ChunkInputs,
    kept: KeptChunks,
    do: torch.Tensor,
    dfinal_NUKV: torch.Tensor | None,
    has_initial: bool,
) -> ChunkGradients:
    """Gradients from those of o and of the final states (by rank)."""
    U = do.shape[1]
    beta, X, d, states = x.beta_MUC, kept.X_MUCV, kept.d_MUCV, kept.states_MUKV
    qk = _per_value_head(_mm(x.q_MHCK, x.k_MHCK.mT), U)
    kk = _per_value_head(_mm(x.k_MHCK, x.k_MHCK.mT), U)
    D = _decays(x)
    dX = _mm((qk * D).mT, do)
    dg = torch.zeros_like(beta)
    if states is None and dfinal_NUKV is None:
        Z, dq_state, dk_state, running = _mm(kept.inverse_MUCc.mT, dX), None, None, None
    else:
        Z, dq_state, dk_state, running = _through_states(grid, x, kept, do, dX, dg, dfinal_NUKV, has_initial)

    dscores_D = _mm(do, X.mT).mul_(D)
    dA_D = _mm(Z, X.mT).neg_().tril_(-1).mul_(D)
    dbeta = (Z * d).sum(-1) + (dA_D * kk).sum(-1)
    dA_D.mul_(beta.unsqueeze(-1))
    exchange = (dA_D * kk).addcmul_(dscores_D, qk)
    dg[..., 1:] += exchange.cumsum(-1).tril_(-1).sum(-2)[..., :-1]
    dqk, dkk = _per_key_head(dscores_D, x.q_MHCK.shape[1]), _per_key_head(dA_D, x.q_MHCK.shape[1])
    dq, dk = _mm(dqk, x.k_MHCK), _mm(dqk.mT, x.q_MHCK) + _mm(dkk + dkk.mT, x.k_MHCK)
    if dq_state is not None:
        dq += _per_key_head(dq_state, dq.shape[1])
    if dk_state is not None:
        dk += _per_key_head(dk_state, dk.shape[1])
    return ChunkGradients(dq, dk, Z * beta.unsqueeze(-1), dg, dbeta, running if has_initial else None)


def _through_states(
    grid: ChunkGrid,
    x: ChunkInputs,
    kept: KeptChunks,
    do: torch.Tensor,
    dX: torch.Tensor,
    dg: torch.Tensor,
    dfinal_NUKV: torch.Tensor | None,
    has_initial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunk after chunk from the last: return Z, dq and dk through the states, and dinitial; adds to dg."""
    U, V = do.shape[1], do.shape[-1]
    q, k = _per_value_head(x.q_MHCK, U), _per_value_head(x.k_MHCK, U)
    X, states = kept.X_MUCV, kept.states_MUKV
    to_end, last, eG = _to_end(x), _last(x.G_MUC), x.G_MUC.exp().unsqueeze(-1)
    Z = torch.empty_like(X)
    dq_state, dk_state = torch.zeros_like(q), torch.zeros_like(k)
    N, K = len(grid.sequence_N), q.shape[-1]
    running = Z.new_zeros(N, U, K, V) if dfinal_NUKV is None else dfinal_NUKV.clone()
    for step in reversed(_steps(grid, not has_initial, dfinal_NUKV is not None)):
        now, passing = step.now, step.passing
        dafter = running[: step.going_on]
        if step.going_on:
            written = X[passing] * to_end[passing]
            dwritten = _mm(k[passing], dafter)
            dX[passing] += dwritten * to_end[passing]
            dk_state[passing] += _mm(written, dafter.mT)
            faded = (written * dwritten).sum(-1)
            dg[passing, :, 1:] += faded.cumsum(-1)[..., :-1]
        Z[now] = _mm(kept.inverse_MUCc[now].mT, dX[now])
        if step.saved is None or states is None:
            continue
        before = states[step.saved]
        if step.going_on:
            shrunk = dafter.mul_(last[passing])
            dg[passing] += _dot(before[: step.going_on], shrunk).unsqueeze(-1)
        dd = Z[now] * x.beta_MUC[now].unsqueeze(-1)
        recalled, read = dd.mul_(eG[now]).neg_(), do[now] * eG[now]
        dq_now, dk_now = _mm(read, before.mT), _mm(recalled, before.mT)
        arriving = (dq_now * q[now]).sum(-1) + (dk_now * k[now]).sum(-1)
        dg[now] += arriving.flip(-1).cumsum(-1).flip(-1)
        dq_state[now] = dq_now
        dk_state[now] += dk_now
        dbefore = running[: step.count]
        dbefore += _mm(q[now].mT, read)
        dbefore += _mm(k[now].mT, recalled)
    return Z, dq_state, dk_state, running


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:2], a.shape[-2], b.shape[-1])


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of the products of two stacks of matrices."""
    rows, columns = a.reshape(-1, 1, a.shape[-2] * a.shape[-1]), b.reshape(-1, b.shape[-2] * b.shape[-1], 1)
    return torch.bmm(rows, columns).view(a.shape[:2])


def _per_value_head(x_MH: torch.Tensor, value_heads: int) -> torch.Tensor:
    group = value_heads // x_MH.shape[1]
    return x_MH if group == 1 else x_MH.repeat_interleave(group, dim=1)


def _per_key_head(x_MU: torch.Tensor, key_heads: int) -> torch.Tensor:
    M, U, *rest = x_MU.shape
    return x_MU if key_heads == U else x_MU.view(M, key_heads, U // key_heads, *rest).sum(2)


def sums_within_chunks(g_MUC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return G = cumsum(g) and what its dtype cannot hold of it.

    The decay between neighbours is a difference of two sums, which may be large beside it: it needs the
    digits that a sum alone has lost.
    """
    if g_MUC.device.type not in ("cpu", "cuda"):
        G_MUC = g_MUC.cumsum(-1)
        return G_MUC, torch.zeros_like(G_MUC)
    exact = g_MUC.cumsum(-1, dtype=torch.float64)
    G_MUC = exact.to(g_MUC.dtype)
    return G_MUC, (exact - G_MUC).to(g_MUC.dtype)


def _decays(x: ChunkInputs) -> torch.Tensor:
    """exp(G_i - G_j) for j <= i, else 0; masked before exp, which could overflow above the diagonal."""
    G, rest = x.G_MUC, x.G_rest_MUC
    C = G.shape[-1]
    above = torch.ones(C, C, dtype=torch.bool, device=G.device).triu_(1)
    between = (G.unsqueeze(-1) - G.unsqueeze(-2)).add_(rest.unsqueeze(-1)).sub_(rest.unsqueeze(-2))
    return between.masked_fill_(above, -torch.inf).exp_()


def _to_end(x: ChunkInputs) -> torch.Tensor:
    G, rest = x.G_MUC, x.G_rest_MUC
    return (G[..., -1:] - G).add_(rest[..., -1:]).sub_(rest).exp_().unsqueeze(-1)


def _last(G_MUC: torch.Tensor) -> torch.Tensor:
    return G_MUC[..., -1:, None].exp()


def _inverse_of_unit_lower(A: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 where only the strictly lower part of A is read."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    inverse: torch.Tensor = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
    return inverse

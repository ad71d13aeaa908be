"""Gated delta rule on CUDA, step 1: what each chunk needs that does not depend on the state before it.

M chunks of C = 64 tokens, H query/key heads, U = H * GROUP value heads, K key dim. One program serves one
chunk of one key head and the GROUP value heads that read it. With k and q normalised, G = cumsum(g) and D_ij
= exp(G_i - G_j), it writes, for each value head,

    inverse = (I + A)^-1,  A = strictly lower part of beta_i (k_i . k_j) D_ij
    scores  = lower part of scale (q_i . k_j) D_ij

and the per-token vectors G, what float32 cannot hold of it, beta, 1 / |q| and 1 / |k|, the last three 0 past
the end of a sequence. D is a difference of two sums, which may be large beside it where a gate has closed: it
needs the digits that the sum alone has lost. Queries and keys themselves are never rewritten: the norms enter
the products as row and column factors.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def unit_lower_inverse(
    a_CC: tl.tensor, C: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr
) -> tl.tensor:
    """Return (I + a)^-1 for a strictly lower triangular float32 a; C = 2 ** LEVELS.

    The inverses of the blocks on the diagonal, of twice the size at each level:
    inv <- inv - inv (what lies below the diagonal between two blocks) inv. That is exact, as substitution is,
    and nothing in it grows where the inverse does not. Factors of the products are rounded to LOW.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    inverse_CC = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a_CC, 0.0))
    for level in tl.static_range(1, LEVELS):
        between = (row >> level != column >> level) & (row >> (level + 1) == column >> (level + 1))
        below_CC = tl.where(between, a_CC, 0.0).to(LOW)
        low_CC = inverse_CC.to(LOW)
        step_CC = tl.dot(low_CC, below_CC)
        inverse_CC -= tl.dot(step_CC.to(LOW), low_CC)
    return inverse_CC


@jit
def prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    inverse: tl.tensor,
    scores: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    step: tl.tensor,
    q_factor: tl.tensor,
    k_factor: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    scale: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    g_stride_t: tl.tensor,
    beta_stride_t: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    L2NORM: tl.constexpr,
    EPS: tl.constexpr,
    LEVELS: tl.constexpr,
    LOW: tl.constexpr,
) -> None:
    """Write the tables of one chunk and one key head; grid (M * H,)."""
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(chunk_starts + chunk).to(tl.int64)
    length = (tl.load(chunk_ends + chunk) - start).to(tl.int32)
    row = tl.arange(0, C)
    feature = tl.arange(0, K)
    valid = row < length

    q_place = q + start * q_stride_t + head * q_stride_h + row[:, None] * q_stride_t + feature[None, :]
    k_place = k + start * k_stride_t + head * k_stride_h + row[:, None] * k_stride_t + feature[None, :]
    q_CK = tl.load(q_place, mask=valid[:, None], other=0.0)
    k_CK = tl.load(k_place, mask=valid[:, None], other=0.0)
    if L2NORM:
        q_float = q_CK.to(tl.float32)
        k_float = k_CK.to(tl.float32)
        q_factor_C = tl.rsqrt(tl.sum(q_float * q_float, axis=1) + EPS)
        k_factor_C = tl.rsqrt(tl.sum(k_float * k_float, axis=1) + EPS)
    else:
        q_factor_C = tl.full([C], 1.0, tl.float32)
        k_factor_C = tl.full([C], 1.0, tl.float32)
    q_factor_C = tl.where(valid, q_factor_C, 0.0)
    k_factor_C = tl.where(valid, k_factor_C, 0.0)
    vectors = chunk.to(tl.int64) * H + head
    tl.store(q_factor + vectors * C + row, q_factor_C)
    tl.store(k_factor + vectors * C + row, k_factor_C)

    keys_CC = tl.dot(k_CK, tl.trans(k_CK)) * (k_factor_C[:, None] * k_factor_C[None, :])
    queries_CC = tl.dot(q_CK, tl.trans(k_CK)) * (scale * q_factor_C[:, None] * k_factor_C[None, :])
    lower = row[:, None] >= row[None, :]
    below = row[:, None] > row[None, :]
    for member in range(GROUP):
        u = head * GROUP + member
        g_C = tl.load(g + start * g_stride_t + row * g_stride_t + u, mask=valid, other=0.0).to(tl.float32)
        beta_C = tl.load(beta + start * beta_stride_t + row * beta_stride_t + u, mask=valid, other=0.0)
        beta_C = beta_C.to(tl.float32)
        exact_C = tl.cumsum(g_C.to(tl.float64), axis=0)
        decay_C = exact_C.to(tl.float32)
        rest_C = (exact_C - decay_C).to(tl.float32)
        gap_CC = (decay_C[:, None] - decay_C[None, :]) + (rest_C[:, None] - rest_C[None, :])
        ratio_CC = tl.exp(tl.where(lower, gap_CC, float("-inf")))
        table = chunk.to(tl.int64) * (H * GROUP) + u
        tl.store(decay + table * C + row, decay_C)
        tl.store(rest + table * C + row, rest_C)
        tl.store(step + table * C + row, beta_C)
        tile = table * (C * C) + row[:, None] * C + row[None, :]
        tl.store(scores + tile, (queries_CC * ratio_CC).to(scores.dtype.element_ty))
        a_CC = tl.where(below, keys_CC * ratio_CC * beta_C[:, None], 0.0)
        inverse_CC = unit_lower_inverse(a_CC, C, LEVELS, LOW)
        tl.store(inverse + tile, inverse_CC.to(inverse.dtype.element_ty))

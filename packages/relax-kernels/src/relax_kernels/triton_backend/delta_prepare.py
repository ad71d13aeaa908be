"""Gated delta rule on CUDA, step 1: what each chunk needs that does not depend on the state before it.

M chunks of C = 64 tokens, H query/key heads, U = H * GROUP value heads, K key dim. One program serves one
chunk of one key head and the GROUP value heads that read it. With k and q normalised, G = cumsum(g) and D_ij
= exp(G_i - G_j), it writes, for each value head,

    inverse = (I + A)^-1,  A = strictly lower part of beta_i (k_i . k_j) D_ij
    scores  = lower part of scale (q_i . k_j) D_ij

and the per-token vectors G, beta, 1 / |q| and 1 / |k|. Queries and keys themselves are never rewritten: the
norms enter the products as row and column factors.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def unit_lower_inverse(
    a_CC: tl.tensor, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return (I + a)^-1 for a strictly lower triangular float32 a; C = 4 B.

    The B x B blocks on the diagonal by forward substitution, all at once; then twice
    inv <- inv - inv (blocks between the halves) inv, which is exact because those blocks are nilpotent.
    """
    blocks: tl.constexpr = C // B
    block = tl.arange(0, blocks)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    a_NBB = tl.sum(tl.where(on_diagonal, tl.reshape(a_CC, [blocks, B, blocks, B]), 0.0), axis=2)
    row = tl.arange(0, B)
    inverse_NBB = -a_NBB
    for i in range(2, B):
        this_row = (row == i)[None, :, None]
        a_NB = tl.sum(tl.where(this_row, a_NBB, 0.0), axis=1)
        new_NB = -a_NB - tl.sum(a_NB[:, :, None] * inverse_NBB, axis=1)
        inverse_NBB = tl.where(this_row, new_NB[:, None, :], inverse_NBB)
    inverse_NBB += tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, 0.0)
    spread = tl.where(on_diagonal, inverse_NBB[:, :, None, :], 0.0)
    inverse_CC = tl.reshape(spread, [C, C])

    index = tl.arange(0, C)
    small = (index[:, None] // B) == (index[None, :] // B)
    large = (index[:, None] // (2 * B)) == (index[None, :] // (2 * B))
    below_CC = tl.where(large & (small == 0), a_CC, 0.0)
    step_CC = tl.dot(inverse_CC, below_CC, input_precision=PRECISION)
    inverse_CC -= tl.dot(step_CC, inverse_CC, input_precision=PRECISION)
    below_CC = tl.where(large, 0.0, a_CC)
    step_CC = tl.dot(inverse_CC, below_CC, input_precision=PRECISION)
    inverse_CC -= tl.dot(step_CC, inverse_CC, input_precision=PRECISION)
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
    PRECISION: tl.constexpr,
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
        decay_C = tl.cumsum(g_C, axis=0)
        ratio_CC = tl.exp(tl.where(lower, decay_C[:, None] - decay_C[None, :], float("-inf")))
        a_CC = tl.where(below, keys_CC * ratio_CC * beta_C[:, None], 0.0)
        inverse_CC = unit_lower_inverse(a_CC, C, C // 4, PRECISION)

        table = chunk.to(tl.int64) * (H * GROUP) + u
        tl.store(decay + table * C + row, decay_C)
        tl.store(step + table * C + row, beta_C)
        tile = table * (C * C) + row[:, None] * C + row[None, :]
        tl.store(inverse + tile, inverse_CC.to(inverse.dtype.element_ty))
        tl.store(scores + tile, (queries_CC * ratio_CC).to(scores.dtype.element_ty))

"""Gated delta rule on CUDA, step 2: the state, chunk after chunk.

M chunks of C tokens, N sequences, H query/key heads, U = H * GROUP value heads, K key dim, V value dim, B
value features of one program. With S the K x V state before a chunk and the tables of `delta_prepare`:

    X = inverse (beta (v - exp(G) k S))
    o = scale exp(G) q S + scores X
    S' = exp(G_C) S + (exp(G_C - G) k)^T X

The state stays in registers in float32. The columns of S are independent, so V is spread over programs.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def scan_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    inverse: tl.tensor,
    scores: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    step: tl.tensor,
    q_factor: tl.tensor,
    k_factor: tl.tensor,
    o: tl.tensor,
    states: tl.tensor,
    updates: tl.tensor,
    initial: tl.tensor,
    final: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_offsets: tl.tensor,
    scale: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_u: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WRITE_FINAL: tl.constexpr,
    WRITE_OUTPUT: tl.constexpr,
    WRITE_STATES: tl.constexpr,
) -> None:
    """Scan one sequence of one value head for B value features; grid (N * U * V / B,).

    WRITE_OUTPUT: write o. WRITE_STATES: write the state before each chunk [M, U, K, V] and X [M, U, C, V].
    """
    U: tl.constexpr = H * GROUP
    parts: tl.constexpr = V // B
    part = tl.program_id(0) % parts
    u = (tl.program_id(0) // parts) % U
    n = tl.program_id(0) // (parts * U)
    head = u // GROUP
    begin = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
    first = tl.load(chunk_offsets + n).to(tl.int64)

    row = tl.arange(0, C)
    feature = tl.arange(0, K)
    column = part * B + tl.arange(0, B)
    tile_CC = row[:, None] * C + row[None, :]
    tile_CV = row[:, None] * V + column[None, :]
    tile_KV = feature[:, None] * V + column[None, :]

    if HAS_INITIAL:
        state_KV = tl.load(initial + (n * U + u).to(tl.int64) * (K * V) + tile_KV).to(tl.float32)
    else:
        state_KV = tl.zeros([K, B], tl.float32)

    k_place = k + begin * k_stride_t + head * k_stride_h + row[:, None] * k_stride_t + feature[None, :]
    q_place = q + begin * q_stride_t + head * q_stride_h + row[:, None] * q_stride_t + feature[None, :]
    v_place = v + begin * v_stride_t + u * v_stride_u + row[:, None] * v_stride_t + column[None, :]
    o_place = o + (begin * U + u) * V + row[:, None] * (U * V) + column[None, :]

    for i in range(tl.cdiv(length, C)):
        table = (first + i) * U + u
        keys = (first + i) * H + head
        valid = row < length - i * C
        k_CK = tl.load(k_place, mask=valid[:, None], other=0.0)
        v_CV = tl.load(v_place, mask=valid[:, None], other=0.0)
        inverse_CC = tl.load(inverse + table * (C * C) + tile_CC)
        decay_C = tl.load(decay + table * C + row)
        rest_C = tl.load(rest + table * C + row)
        total = tl.load(decay + table * C + (C - 1))
        to_end_C = (total - decay_C) + (tl.load(rest + table * C + (C - 1)) - rest_C)
        beta_C = tl.load(step + table * C + row)
        k_factor_C = tl.load(k_factor + keys * C + row)

        state_low = state_KV.to(k_CK.dtype)
        if WRITE_STATES:
            tl.store(states + table * (K * V) + tile_KV, state_low)
        recalled_CV = tl.dot(k_CK, state_low) * (tl.exp(decay_C) * k_factor_C)[:, None]
        wanted_CV = (v_CV.to(tl.float32) - recalled_CV) * beta_C[:, None]
        x_CV = tl.dot(inverse_CC, wanted_CV.to(k_CK.dtype))
        if WRITE_STATES:
            tl.store(updates + table * (C * V) + tile_CV, x_CV.to(updates.dtype.element_ty))
        if WRITE_OUTPUT:
            q_CK = tl.load(q_place, mask=valid[:, None], other=0.0)
            scores_CC = tl.load(scores + table * (C * C) + tile_CC)
            q_factor_C = tl.load(q_factor + keys * C + row)
            o_CV = tl.dot(q_CK, state_low) * (scale * tl.exp(decay_C) * q_factor_C)[:, None]
            o_CV = tl.dot(scores_CC, x_CV.to(k_CK.dtype), acc=o_CV)
            tl.store(o_place, o_CV.to(o.dtype.element_ty), mask=valid[:, None])
        carried_CV = x_CV * (tl.exp(to_end_C) * k_factor_C)[:, None]
        state_KV = state_KV * tl.exp(total)
        state_KV = tl.dot(tl.trans(k_CK), carried_CV.to(k_CK.dtype), acc=state_KV)

        k_place += C * k_stride_t
        q_place += C * q_stride_t
        v_place += C * v_stride_t
        o_place += C * U * V

    if WRITE_FINAL:
        tl.store(final + (n * U + u).to(tl.int64) * (K * V) + tile_KV, state_KV)

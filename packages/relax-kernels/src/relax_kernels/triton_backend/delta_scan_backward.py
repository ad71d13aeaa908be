"""Gated delta rule on CUDA, step 3: the gradient of the state, chunk before chunk.

Axes as in `delta_scan`. With dS' the gradient of the state after a chunk and do that of its output:

    dX  = scores^T do + exp(G_C - G) k dS'
    dU  = inverse^T dX                       (gradient of beta (v - exp(G) k S))
    dS  = exp(G_C) dS' + (scale exp(G) q)^T do - (beta exp(G) k)^T dU
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def scan_backward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    do: tl.tensor,
    inverse: tl.tensor,
    scores: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    step: tl.tensor,
    q_factor: tl.tensor,
    k_factor: tl.tensor,
    dstates: tl.tensor,
    dupdates: tl.tensor,
    dinitial: tl.tensor,
    dfinal: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_offsets: tl.tensor,
    scale: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    do_stride_t: tl.tensor,
    do_stride_u: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    WRITE_DINITIAL: tl.constexpr,
) -> None:
    """Scan one sequence of one value head backwards for B value features; grid (N * U * V / B,).

    Writes dS' of each chunk [M, U, K, V] and dU [M, U, C, V].
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
    chunks = tl.cdiv(length, C)

    row = tl.arange(0, C)
    feature = tl.arange(0, K)
    column = part * B + tl.arange(0, B)
    tile_CC = row[:, None] * C + row[None, :]
    tile_CV = row[:, None] * V + column[None, :]
    tile_KV = feature[:, None] * V + column[None, :]

    if HAS_DFINAL:
        dstate_KV = tl.load(dfinal + (n * U + u).to(tl.int64) * (K * V) + tile_KV).to(tl.float32)
    else:
        dstate_KV = tl.zeros([K, B], tl.float32)

    end = begin + (chunks - 1) * C
    k_place = k + end * k_stride_t + head * k_stride_h + row[:, None] * k_stride_t + feature[None, :]
    q_place = q + end * q_stride_t + head * q_stride_h + row[:, None] * q_stride_t + feature[None, :]
    do_place = do + end * do_stride_t + u * do_stride_u + row[:, None] * do_stride_t + column[None, :]

    for back in range(chunks):
        i = chunks - 1 - back
        table = (first + i) * U + u
        keys = (first + i) * H + head
        valid = row < length - i * C
        q_CK = tl.load(q_place, mask=valid[:, None], other=0.0)
        k_CK = tl.load(k_place, mask=valid[:, None], other=0.0)
        do_CV = tl.load(do_place, mask=valid[:, None], other=0.0)
        inverse_CC = tl.load(inverse + table * (C * C) + tile_CC)
        scores_CC = tl.load(scores + table * (C * C) + tile_CC)
        decay_C = tl.load(decay + table * C + row)
        rest_C = tl.load(rest + table * C + row)
        total = tl.load(decay + table * C + (C - 1))
        to_end_C = (total - decay_C) + (tl.load(rest + table * C + (C - 1)) - rest_C)
        beta_C = tl.load(step + table * C + row)
        q_factor_C = tl.load(q_factor + keys * C + row)
        k_factor_C = tl.load(k_factor + keys * C + row)

        dstate_low = dstate_KV.to(k_CK.dtype)
        tl.store(dstates + table * (K * V) + tile_KV, dstate_low)
        dx_CV = tl.dot(k_CK, dstate_low) * (tl.exp(to_end_C) * k_factor_C)[:, None]
        dx_CV = tl.dot(tl.trans(scores_CC), do_CV, acc=dx_CV)
        du_CV = tl.dot(tl.trans(inverse_CC), dx_CV.to(k_CK.dtype))
        tl.store(dupdates + table * (C * V) + tile_CV, du_CV.to(dupdates.dtype.element_ty))
        seen_CV = do_CV.to(tl.float32) * (scale * tl.exp(decay_C) * q_factor_C)[:, None]
        erased_CV = du_CV * (-beta_C * tl.exp(decay_C) * k_factor_C)[:, None]
        dstate_KV = dstate_KV * tl.exp(total)
        dstate_KV = tl.dot(tl.trans(q_CK), seen_CV.to(k_CK.dtype), acc=dstate_KV)
        dstate_KV = tl.dot(tl.trans(k_CK), erased_CV.to(k_CK.dtype), acc=dstate_KV)

        k_place -= C * k_stride_t
        q_place -= C * q_stride_t
        do_place -= C * do_stride_t

    if WRITE_DINITIAL:
        tl.store(dinitial + (n * U + u).to(tl.int64) * (K * V) + tile_KV, dstate_KV)

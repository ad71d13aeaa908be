"""Gated delta rule on CUDA, step 4: gradients of the inputs, all chunks at once.

Axes as in `delta_scan`. One program serves one chunk of one key head and its GROUP value heads, so that the
gradients of q, then of k, are summed in registers. With S the state before the chunk, dS' the gradient of the
state after it, X and dU from the scans, q and k normalised, D_ij = exp(G_i - G_j):

    E_ij = scale (do_i . X_j) D_ij for j <= i        F_ij = (dU_i . X_j) D_ij for j < i
    dq   = scale exp(G) do S^T + E k
    L    = exp(G) dU S^T + F k                       (dk of the erased value is -beta L)
    R    = exp(G_C - G) X dS'^T + E^T q - F^T (beta k)
    dk   = R - beta L        dv = beta dU        dbeta_i = dU_i . v_i - k_i . L_i
    dG_i = q_i . dq_i - beta_i k_i . L_i - k_i . R_i,   and at the last token + <S', dS'>

dG follows from where G enters: exp(G) beside q, exp(G) beside the erased k, exp(-G) beside every other k. Its
sums cancel between tokens, exactly so for a pair within the chunk. So that rounding does not undo it, E and F
are rounded once with all their factors (E / (|q| |k|), beta F / |k|^2), and what is summed in registers is dq
/ |q| and dk / |k|: both ends of a pair then have the same product. No product takes the transpose of a tensor
that is not in memory as its left factor: Triton 3.4 to 3.7.0 computes that wrongly on Hopper
(flash-linear-attention issues 640 and 984). E^T and F^T are computed from their own products instead.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def gradients_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    do: tl.tensor,
    states: tl.tensor,
    updates: tl.tensor,
    dstates: tl.tensor,
    dupdates: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    q_factor: tl.tensor,
    k_factor: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    sums: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    scale: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_u: tl.tensor,
    do_stride_t: tl.tensor,
    do_stride_u: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    L2NORM: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the gradients of one chunk and one key head; grid (M * H,). `sums` [4, M, U, C] is working
    memory.
    """
    U: tl.constexpr = H * GROUP
    chunk = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    start = tl.load(chunk_starts + chunk).to(tl.int64)
    length = (tl.load(chunk_ends + chunk) - start).to(tl.int32)
    row = tl.arange(0, C)
    feature = tl.arange(0, K)
    valid = row < length
    lower = row[:, None] >= row[None, :]
    below = row[:, None] > row[None, :]
    upper = row[:, None] <= row[None, :]
    above = row[:, None] < row[None, :]

    q_place = q + start * q_stride_t + head * q_stride_h + (row[:, None] * q_stride_t + feature[None, :])
    k_place = k + start * k_stride_t + head * k_stride_h + (row[:, None] * k_stride_t + feature[None, :])
    q_CK = tl.load(q_place, mask=valid[:, None], other=0.0)
    k_CK = tl.load(k_place, mask=valid[:, None], other=0.0)
    keys = chunk * H + head
    q_factor_C = tl.load(q_factor + keys * C + row)
    k_factor_C = tl.load(k_factor + keys * C + row)
    tile_CK = row[:, None] * (H * K) + feature[None, :]
    first = (start * H + head) * K

    # Row sums are stored as they are and combined at the end: Triton would otherwise carry their layout,
    # which suits one-dimensional vectors, back through the sum and move whole tiles between layouts.
    sums_at = sums + chunk * (U * C) + row
    plane = tl.num_programs(0).to(tl.int64) * (GROUP * C)

    dq_CK = tl.zeros([C, K], tl.float32)
    for member in range(GROUP):
        u = head * GROUP + member
        table = chunk * U + u
        decay_C = tl.load(decay + table * C + row)
        do_place = do + start * do_stride_t + u * do_stride_u
        e_CC = tl.zeros([C, C], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            x_CV = tl.load(updates + table * (C * V) + (row[:, None] * V + column[None, :]))
            do_CV = tl.load(
                do_place + (row[:, None] * do_stride_t + column[None, :]), mask=valid[:, None], other=0.0
            )
            e_CC = tl.dot(do_CV, tl.trans(x_CV), acc=e_CC)
        ratio_CC = tl.exp(tl.where(lower, decay_C[:, None] - decay_C[None, :], float("-inf")))
        e_CC = e_CC * ratio_CC * (scale * q_factor_C)[:, None] * k_factor_C[None, :]
        e_low = e_CC.to(k_CK.dtype)
        query_CK = tl.zeros([C, K], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            state_KV = tl.load(states + table * (K * V) + (feature[:, None] * V + column[None, :]))
            do_CV = tl.load(
                do_place + (row[:, None] * do_stride_t + column[None, :]), mask=valid[:, None], other=0.0
            )
            query_CK = tl.dot(do_CV, tl.trans(state_KV), acc=query_CK)
        query_CK = tl.dot(e_low, k_CK, acc=query_CK * (scale * tl.exp(decay_C) * q_factor_C)[:, None])
        dq_CK += query_CK
        q_again = tl.load(q_place, mask=valid[:, None], other=0.0).to(tl.float32)
        tl.store(sums_at + u * C, tl.sum(query_CK * q_again, axis=1))
    if L2NORM:
        q_again = tl.load(q_place, mask=valid[:, None], other=0.0).to(tl.float32)
        along_C = tl.sum(dq_CK * q_again, axis=1) * q_factor_C * q_factor_C
        dq_CK -= q_again * along_C[:, None]
    tl.store(dq + first + tile_CK, dq_CK.to(dq.dtype.element_ty), mask=valid[:, None])

    dk_CK = tl.zeros([C, K], tl.float32)
    for member in range(GROUP):
        u = head * GROUP + member
        table = chunk * U + u
        decay_C = tl.load(decay + table * C + row)
        total = tl.load(decay + table * C + (C - 1))
        beta_C = tl.load(step + table * C + row)
        # Divided out again below: 0 would take with it what beta's own gradient needs.
        divisor_C = tl.maximum(beta_C, 1e-12)
        v_place = v + start * v_stride_t + u * v_stride_u
        dv_place = dv + (start * U + u) * V
        do_place = do + start * do_stride_t + u * do_stride_u

        f_CC = tl.zeros([C, C], tl.float32)
        seen_C = tl.zeros([C], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            tile_CV = row[:, None] * V + column[None, :]
            x_CV = tl.load(updates + table * (C * V) + tile_CV)
            du_CV = tl.load(dupdates + table * (C * V) + tile_CV)
            v_CV = tl.load(
                v_place + (row[:, None] * v_stride_t + column[None, :]), mask=valid[:, None], other=0.0
            )
            f_CC = tl.dot(du_CV, tl.trans(x_CV), acc=f_CC)
            du_float = du_CV.to(tl.float32)
            seen_C += tl.sum(du_float * v_CV.to(tl.float32), axis=1)
            dv_CV = (du_float * beta_C[:, None]).to(dv.dtype.element_ty)
            tl.store(dv_place + (row[:, None] * (U * V) + column[None, :]), dv_CV, mask=valid[:, None])
        tl.store(sums_at + plane + u * C, seen_C)
        ratio_CC = tl.exp(tl.where(below, decay_C[:, None] - decay_C[None, :], float("-inf")))
        f_CC = f_CC * ratio_CC * (divisor_C * k_factor_C)[:, None] * k_factor_C[None, :]
        f_low = f_CC.to(k_CK.dtype)
        erase_CK = tl.zeros([C, K], tl.float32)
        overlap = 0.0
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            tile_KV = feature[:, None] * V + column[None, :]
            state_KV = tl.load(states + table * (K * V) + tile_KV)
            dstate_KV = tl.load(dstates + table * (K * V) + tile_KV)
            du_CV = tl.load(dupdates + table * (C * V) + (row[:, None] * V + column[None, :]))
            erase_CK = tl.dot(du_CV, tl.trans(state_KV), acc=erase_CK)
            overlap += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32))
        erase_CK = tl.dot(f_low, k_CK, acc=erase_CK * (tl.exp(decay_C) * divisor_C * k_factor_C)[:, None])
        dk_CK -= erase_CK
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        tl.store(sums_at + 2 * plane + u * C, tl.sum(erase_CK * k_again, axis=1))

        e_CC = tl.zeros([C, C], tl.float32)
        f_CC = tl.zeros([C, C], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            tile_CV = row[:, None] * V + column[None, :]
            x_CV = tl.load(updates + table * (C * V) + tile_CV)
            du_CV = tl.load(dupdates + table * (C * V) + tile_CV)
            do_CV = tl.load(
                do_place + (row[:, None] * do_stride_t + column[None, :]), mask=valid[:, None], other=0.0
            )
            e_CC = tl.dot(x_CV, tl.trans(do_CV), acc=e_CC)
            f_CC = tl.dot(x_CV, tl.trans(du_CV), acc=f_CC)
        ratio_CC = tl.exp(tl.where(upper, decay_C[None, :] - decay_C[:, None], float("-inf")))
        e_CC = e_CC * ratio_CC * (scale * q_factor_C)[None, :] * k_factor_C[:, None]
        e_low = e_CC.to(k_CK.dtype)
        f_CC = f_CC * ratio_CC * (-divisor_C * k_factor_C)[None, :] * k_factor_C[:, None]
        f_low = tl.where(above, f_CC, 0.0).to(k_CK.dtype)
        keep_CK = tl.zeros([C, K], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            dstate_KV = tl.load(dstates + table * (K * V) + (feature[:, None] * V + column[None, :]))
            x_CV = tl.load(updates + table * (C * V) + (row[:, None] * V + column[None, :]))
            keep_CK = tl.dot(x_CV, tl.trans(dstate_KV), acc=keep_CK)
        keep_CK = keep_CK * (tl.exp(total - decay_C) * k_factor_C)[:, None]
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        gain = overlap * tl.exp(total) + tl.sum(tl.sum(keep_CK * k_again, axis=1))
        keep_CK = tl.dot(e_low, q_CK, acc=keep_CK)
        keep_CK = tl.dot(f_low, k_CK, acc=keep_CK)
        dk_CK += keep_CK
        tl.store(sums_at + 3 * plane + u * C, tl.sum(keep_CK * k_again, axis=1))

        # The sums were written by other threads of this program.
        tl.debug_barrier()
        erased_C = tl.load(sums_at + 2 * plane + u * C)
        ddecay_C = tl.load(sums_at + u * C) - erased_C - tl.load(sums_at + 3 * plane + u * C)
        dg_C = tl.sum(ddecay_C, axis=0) - tl.cumsum(ddecay_C, axis=0) + ddecay_C + gain
        token = (start + row) * U + u
        tl.store(dg + token, dg_C, mask=valid)
        tl.store(dbeta + token, tl.load(sums_at + plane + u * C) - erased_C / divisor_C, mask=valid)
    if L2NORM:
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        along_C = tl.sum(dk_CK * k_again, axis=1) * k_factor_C * k_factor_C
        dk_CK -= k_again * along_C[:, None]
    tl.store(dk + first + tile_CK, dk_CK.to(dk.dtype.element_ty), mask=valid[:, None])


@jit
def decay_kernel(
    row_gains: tl.tensor,
    chunk_gains: tl.tensor,
    dg: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    U: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Add up dG of one chunk and value head to dg: over the tokens from each on, and <S', dS'>; grid (M *
    U,).
    """
    u = tl.program_id(0) % U
    chunk = tl.program_id(0) // U
    start = tl.load(chunk_starts + chunk)
    row = tl.arange(0, C)
    ddecay_C = tl.load(row_gains + tl.program_id(0).to(tl.int64) * C + row)
    gain = tl.load(chunk_gains + tl.program_id(0))
    dg_C = tl.sum(ddecay_C, axis=0) - tl.cumsum(ddecay_C, axis=0) + ddecay_C + gain
    inside = row < tl.load(chunk_ends + chunk) - start
    tl.store(dg + (start + row).to(tl.int64) * U + u, dg_C, mask=inside)

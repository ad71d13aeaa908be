"""Gated delta rule on CUDA, step 4: gradients of the inputs, all chunks at once.

Axes as in `delta_scan`. One program serves one chunk of one key head and its GROUP value heads, so that the
gradients of q, then of k, are summed in registers. With S the state before the chunk, dS' the gradient of the
state after it, X and dU from the scans, q and k normalised, D_ij = exp(G_i - G_j):

    E_ij = scale (do_i . X_j) D_ij for j <= i        F_ij = (dU_i . X_j) D_ij for j < i
    dq   = scale exp(G) do S^T + E k
    L    = exp(G) dU S^T + F k                       (dk of the erased value is -beta L)
    R    = exp(G_C - G) X dS'^T + E^T q - F^T (beta k)
    dk   = R - beta L        dv = beta dU        dbeta_i = dU_i . v_i - k_i . L_i

dg_t is the sum of what passes token t, j < t <= i, where j may be the state before the chunk and i the one
after it:

    pairs      P_ij = E_ij q_i . k_j - beta_i F_ij k_i . k_j
    S to i     a_i  = exp(G_i) (scale q_i . (do S^T)_i - beta_i k_i . (dU S^T)_i)
    j to S'    b_j  = exp(G_C - G_j) k_j . (X dS'^T)_j
    S to S'    exp(G_C) <S, dS'>

It is summed as that, not as a running sum of q . dq - k . dk in which what does not pass cancels: little
passes a gate that closes, and the rounding of the rest would be left. The sum over pairs takes a product with
a triangle of ones, so the pairs are rounded to the inputs' dtype, each on its own scale.

E and F are rounded with all their factors (E / (|q| |k|), beta F / |k|^2), and what is summed in registers is
dq / |q| and dk / |k|. No product takes the transpose of a tensor that is not in memory as its left factor:
Triton 3.4 to 3.7.0 computes that wrongly on Hopper (flash-linear-attention issues 640 and 984). E^T and F^T
are computed from their own products instead.
"""

from __future__ import annotations

import triton.language as tl

from relax_kernels.triton_backend.jit import jit


@jit
def sum_of_passing(before_C: tl.tensor, after_C: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return, for each t, the sum of before_j for j < t and of after_i for i >= t."""
    t = tl.arange(0, C)[:, None]
    other = tl.arange(0, C)[None, :]
    return tl.sum(tl.where(other < t, before_C[None, :], after_C[None, :]), axis=1)


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
    rest: tl.tensor,
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
    """Write the gradients of one chunk and one key head; grid (M * H,). `sums` [6, M, U, C] is working
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
        rest_C = tl.load(rest + table * C + row)
        do_place = do + start * do_stride_t + u * do_stride_u
        e_CC = tl.zeros([C, C], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            x_CV = tl.load(updates + table * (C * V) + (row[:, None] * V + column[None, :]))
            do_CV = tl.load(
                do_place + (row[:, None] * do_stride_t + column[None, :]), mask=valid[:, None], other=0.0
            )
            e_CC = tl.dot(do_CV, tl.trans(x_CV), acc=e_CC)
        gap_CC = (decay_C[:, None] - decay_C[None, :]) + (rest_C[:, None] - rest_C[None, :])
        ratio_CC = tl.exp(tl.where(lower, gap_CC, float("-inf")))
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
        query_CK *= (scale * tl.exp(decay_C) * q_factor_C)[:, None]
        q_again = tl.load(q_place, mask=valid[:, None], other=0.0).to(tl.float32)
        tl.store(sums_at + u * C, tl.sum(query_CK * q_again, axis=1))
        dq_CK += tl.dot(e_low, k_CK, acc=query_CK)
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
        rest_C = tl.load(rest + table * C + row)
        total = tl.load(decay + table * C + (C - 1))
        to_end_C = (total - decay_C) + (tl.load(rest + table * C + (C - 1)) - rest_C)
        gap_CC = (decay_C[:, None] - decay_C[None, :]) + (rest_C[:, None] - rest_C[None, :])
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
        ratio_CC = tl.exp(tl.where(below, gap_CC, float("-inf")))
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
        erase_CK *= (tl.exp(decay_C) * divisor_C * k_factor_C)[:, None]
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        tl.store(sums_at + 4 * plane + u * C, tl.sum(erase_CK * k_again, axis=1))
        erase_CK = tl.dot(f_low, k_CK, acc=erase_CK)
        dk_CK -= erase_CK
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
        ratio_CC = tl.exp(tl.where(upper, -gap_CC, float("-inf")))
        e_CC = e_CC * ratio_CC * (scale * q_factor_C)[None, :] * k_factor_C[:, None]
        e_low = e_CC.to(k_CK.dtype)
        f_CC = f_CC * ratio_CC * (-divisor_C * k_factor_C)[None, :] * k_factor_C[:, None]
        f_low = tl.where(above, f_CC, 0.0).to(k_CK.dtype)
        pairs_CC = e_CC * tl.dot(k_CK, tl.trans(q_CK)) + f_CC * tl.dot(k_CK, tl.trans(k_CK))
        pairs_low = tl.where(above, pairs_CC, 0.0).to(k_CK.dtype)
        later_CC = tl.dot(pairs_low, tl.where(lower, 1.0, 0.0).to(k_CK.dtype))
        tl.store(sums_at + 5 * plane + u * C, tl.sum(tl.where(above, later_CC, 0.0), axis=0))
        keep_CK = tl.zeros([C, K], tl.float32)
        for part in tl.range(V // B, num_stages=STAGES):
            column = part * B + tl.arange(0, B)
            dstate_KV = tl.load(dstates + table * (K * V) + (feature[:, None] * V + column[None, :]))
            x_CV = tl.load(updates + table * (C * V) + (row[:, None] * V + column[None, :]))
            keep_CK = tl.dot(x_CV, tl.trans(dstate_KV), acc=keep_CK)
        keep_CK = keep_CK * (tl.exp(to_end_C) * k_factor_C)[:, None]
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        tl.store(sums_at + 3 * plane + u * C, tl.sum(keep_CK * k_again, axis=1))
        keep_CK = tl.dot(e_low, q_CK, acc=keep_CK)
        keep_CK = tl.dot(f_low, k_CK, acc=keep_CK)
        dk_CK += keep_CK

        # The sums were written by other threads of this program.
        tl.debug_barrier()
        after_C = tl.load(sums_at + u * C) - tl.load(sums_at + 4 * plane + u * C)
        before_C = tl.load(sums_at + 3 * plane + u * C)
        dg_C = sum_of_passing(before_C, after_C, C) + tl.load(sums_at + 5 * plane + u * C)
        token = (start + row) * U + u
        tl.store(dg + token, dg_C + overlap * tl.exp(total), mask=valid)
        erased_C = tl.load(sums_at + 2 * plane + u * C)
        tl.store(dbeta + token, tl.load(sums_at + plane + u * C) - erased_C / divisor_C, mask=valid)
    if L2NORM:
        k_again = tl.load(k_place, mask=valid[:, None], other=0.0).to(tl.float32)
        along_C = tl.sum(dk_CK * k_again, axis=1) * k_factor_C * k_factor_C
        dk_CK -= k_again * along_C[:, None]
    tl.store(dk + first + tile_CK, dk_CK.to(dk.dtype.element_ty), mask=valid[:, None])


@jit
def decay_kernel(
    sums: tl.tensor,
    chunk_gains: tl.tensor,
    dg: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    U: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Make dg of one chunk and value head; grid (M * U,).

    sums [3, M, U, C]: a, b, and what pairs add to dg. chunk_gains [M, U]: what passes from S to S'.
    """
    u = tl.program_id(0) % U
    chunk = tl.program_id(0) // U
    start = tl.load(chunk_starts + chunk)
    row = tl.arange(0, C)
    plane = tl.num_programs(0).to(tl.int64) * C
    sums_at = sums + tl.program_id(0).to(tl.int64) * C + row
    dg_C = sum_of_passing(tl.load(sums_at + plane), tl.load(sums_at), C) + tl.load(sums_at + 2 * plane)
    dg_C += tl.load(chunk_gains + tl.program_id(0))
    inside = row < tl.load(chunk_ends + chunk) - start
    tl.store(dg + (start + row).to(tl.int64) * U + u, dg_C, mask=inside)

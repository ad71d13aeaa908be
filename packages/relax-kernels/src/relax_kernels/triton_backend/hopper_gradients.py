"""Gradients of the gated delta rule's inputs for Hopper.

`delta_gradients` as one persistent program a multiprocessor. Axes, names and formulas as in
`delta_gradients`. A program walks over items (one chunk of one key head) and, in each, over the GROUP value
heads; that is its sequence of jobs. Each tile has one place in shared memory, and the copy engine fills it
for the next job as soon as this one has used it: the loads of one job run under the products of the other.
Two warp groups share the columns of every product. Rows past the end of a sequence are cleared as in
`hopper_scan`. Left factors may be transposed here, since they lie in shared memory: E^T and F^T are E and F.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relax_kernels.triton_backend.hopper_scan import clear_rows
from relax_kernels.triton_backend.jit import gluon_jit


@gluon_jit
def gradients_kernel(
    q: tma.tensor_descriptor,
    k: tma.tensor_descriptor,
    v: tma.tensor_descriptor,
    do: tma.tensor_descriptor,
    states: tma.tensor_descriptor,
    updates: tma.tensor_descriptor,
    dstates: tma.tensor_descriptor,
    dupdates: tma.tensor_descriptor,
    decay: gl.tensor,
    rest: gl.tensor,
    step: gl.tensor,
    q_factor: gl.tensor,
    k_factor: gl.tensor,
    dq: gl.tensor,
    dk: gl.tensor,
    dv: gl.tensor,
    sums: gl.tensor,
    dbeta: gl.tensor,
    chunk_gains: gl.tensor,
    chunk_starts: gl.tensor,
    chunk_ends: gl.tensor,
    chunks: gl.tensor,
    scale: gl.tensor,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    L2NORM: gl.constexpr,
) -> None:
    """Write dq, dk, dv, dbeta, and what `decay_kernel` makes dg of; grid (P,), any P."""
    U: gl.constexpr = H * GROUP
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    dense: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [8, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    row = gl.arange(0, C, layout=rows)
    square_rows: gl.constexpr = gl.SliceLayout(1, square)
    square_row = gl.arange(0, C, layout=square_rows)
    square_column = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    dense_row = gl.arange(0, C, layout=gl.SliceLayout(1, dense))
    dense_column = gl.arange(0, K, layout=gl.SliceLayout(0, dense))

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, K], q.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, K], k.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, V], v.layout)
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, V], do.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, V], updates.layout)
    du_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, V], dupdates.layout)
    state_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, K, V], states.layout)
    dstate_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, K, V], dstates.layout)
    pair: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    e_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], pair)
    f_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], pair)
    pair_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], pair)
    one_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], pair)
    # One barrier for each moment at which tiles are free again: q and k; X, do and dU; v; S; dS'.
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    state_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dstate_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_ready, count=1)
    mbarrier.init(rows_ready, count=1)
    mbarrier.init(value_ready, count=1)
    mbarrier.init(state_ready, count=1)
    mbarrier.init(dstate_ready, count=1)

    items = chunks * H
    item = gl.program_id(0)
    stride = gl.num_programs(0)
    chunk = item // H
    head = item % H
    more = item < items
    start = gl.load(chunk_starts + chunk, mask=more, other=0)
    u = head * GROUP
    table = chunk * U + u
    mbarrier.expect(keys_ready, 4 * C * K, pred=more)
    tma.async_copy_global_to_shared(q, [start, head * K], keys_ready, q_tiles.index(0), pred=more)
    tma.async_copy_global_to_shared(k, [start, head * K], keys_ready, k_tiles.index(0), pred=more)
    mbarrier.expect(rows_ready, 6 * C * V, pred=more)
    tma.async_copy_global_to_shared(updates, [table * C, 0], rows_ready, x_tiles.index(0), pred=more)
    tma.async_copy_global_to_shared(do, [start, u * V], rows_ready, do_tiles.index(0), pred=more)
    tma.async_copy_global_to_shared(dupdates, [table * C, 0], rows_ready, du_tiles.index(0), pred=more)
    mbarrier.expect(state_ready, 2 * K * V, pred=more)
    tma.async_copy_global_to_shared(states, [table * K, 0], state_ready, state_tiles.index(0), pred=more)
    mbarrier.expect(value_ready, 2 * C * V, pred=more)
    tma.async_copy_global_to_shared(v, [start, u * V], value_ready, v_tiles.index(0), pred=more)
    mbarrier.expect(dstate_ready, 2 * K * V, pred=more)
    tma.async_copy_global_to_shared(dstates, [table * K, 0], dstate_ready, dstate_tiles.index(0), pred=more)

    lower = square_row[:, None] >= square_column[None, :]
    strict = square_row[:, None] > square_column[None, :]
    # Ones at [t, i] for i >= t: a product with them sums a column's pairs over what lies from t on.
    one_tiles.index(0).store(gl.where(strict, 0.0, 1.0).to(gl.bfloat16))
    plane = chunks * (U * C)
    zero_CC = gl.zeros([C, C], gl.float32, layout=square)
    zero_CK = gl.zeros([C, K], gl.float32, layout=wide)
    dq_CK = zero_CK
    dk_CK = zero_CK
    count = (items - item + stride - 1) // stride
    for job in range(count * GROUP):
        # Always 0, but not known to be: else a descriptor of each step of each product is computed before the
        # loop, and there are no registers to keep them in.
        zero = job >> 30
        q_tile = q_tiles.index(zero)
        k_tile = k_tiles.index(zero)
        v_tile = v_tiles.index(zero)
        do_tile = do_tiles.index(zero)
        x_tile = x_tiles.index(zero)
        du_tile = du_tiles.index(zero)
        state_tile = state_tiles.index(zero)
        dstate_tile = dstate_tiles.index(zero)
        e_tile = e_tiles.index(zero)
        f_tile = f_tiles.index(zero)
        pair_tile = pair_tiles.index(zero)
        one_tile = one_tiles.index(zero)
        member = job % GROUP
        phase = job & 1
        item = gl.program_id(0) + (job // GROUP) * stride
        chunk = item // H
        head = item % H
        u = head * GROUP + member
        table = chunk * U + u
        length = gl.load(chunk_ends + chunk) - gl.load(chunk_starts + chunk)
        start = gl.load(chunk_starts + chunk)
        # The next job.
        next_member = (job + 1) % GROUP
        next_item = gl.program_id(0) + ((job + 1) // GROUP) * stride
        more = next_item < items
        next_chunk = next_item // H
        next_head = next_item % H
        next_u = next_head * GROUP + next_member
        next_table = next_chunk * U + next_u
        next_start = gl.load(chunk_starts + next_chunk, mask=more, other=0)

        vector = table * C
        keys = (chunk * H + head) * C
        total = gl.load(decay + vector + (C - 1))
        total_rest = gl.load(rest + vector + (C - 1))
        decay_C = gl.load(decay + vector + row)
        rest_C = gl.load(rest + vector + row)
        beta_C = gl.load(step + vector + row)
        k_factor_C = gl.load(k_factor + keys + row)
        q_factor_C = gl.load(q_factor + keys + row)
        divisor_C = gl.maximum(beta_C, 1e-12)
        # Rows lie in the same threads in both layouts.
        down_C = gl.convert_layout(decay_C, square_rows, assert_trivial=True)
        down_rest_C = gl.convert_layout(rest_C, square_rows, assert_trivial=True)
        down_q_C = gl.convert_layout(q_factor_C * scale, square_rows, assert_trivial=True)
        down_k_C = gl.convert_layout(k_factor_C, square_rows, assert_trivial=True)
        down_beta_C = gl.convert_layout(divisor_C, square_rows, assert_trivial=True)
        across_C = gl.load(decay + vector + square_column)
        across_rest_C = gl.load(rest + vector + square_column)
        across_k_C = gl.load(k_factor + keys + square_column)

        mbarrier.wait(rows_ready, phase)
        mbarrier.wait(keys_ready, (job // GROUP) & 1)
        if length < C:
            # Not v: its rows only make rows of sums that are not written.
            clear_rows(q_tile, length, C, K, 8)
            clear_rows(k_tile, length, C, K, 8)
            clear_rows(do_tile, length, C, V, 8)
            fence_async_shared()
            gl.thread_barrier()
        e_CC = warpgroup_mma(do_tile, x_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        f_CC = warpgroup_mma(du_tile, x_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        qk_CC = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        kk_CC = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        gap_CC = (down_C[:, None] - across_C[None, :]) + (down_rest_C[:, None] - across_rest_C[None, :])
        ratio_CC = gl.exp(gl.where(lower, gap_CC, float("-inf")))
        e_CC, f_CC, qk_CC, kk_CC = warpgroup_mma_wait(0, deps=(e_CC, f_CC, qk_CC, kk_CC))
        e_CC = e_CC * ratio_CC * down_q_C[:, None] * across_k_C[None, :]
        e_tile.store(e_CC.to(gl.bfloat16))
        f_CC = f_CC * ratio_CC * (-down_beta_C * down_k_C)[:, None] * across_k_C[None, :]
        f_CC = gl.where(strict, f_CC, 0.0)
        f_tile.store(f_CC.to(gl.bfloat16))
        f_CC = f_CC * kk_CC
        erased_pairs_C = gl.convert_layout(gl.sum(f_CC, axis=1), rows, assert_trivial=True)
        pair_tile.store((f_CC + gl.where(strict, e_CC * qk_CC, 0.0)).to(gl.bfloat16))
        fence_async_shared()

        mbarrier.wait(state_ready, phase)
        query_CK = warpgroup_mma(do_tile, state_tile.permute((1, 0)), zero_CK, use_acc=False, is_async=True)
        erase_CK = warpgroup_mma(du_tile, state_tile.permute((1, 0)), zero_CK, use_acc=False, is_async=True)
        mbarrier.wait(value_ready, phase)
        du_CV = du_tile.load(wide).to(gl.float32)
        seen_C = gl.sum(du_CV * v_tile.load(wide).to(gl.float32), axis=1)
        dv_CV = gl.convert_layout((du_CV * beta_C[:, None]).to(gl.bfloat16), dense)
        dv_place = (
            dv + (start.to(gl.int64) * U + u) * V + (dense_row[:, None] * (U * V) + dense_column[None, :])
        )
        gl.store(dv_place, dv_CV, mask=(dense_row < length)[:, None])
        mbarrier.wait(dstate_ready, phase)
        overlap_SV = gl.zeros([K // 4, V], gl.float32, layout=dense)
        for quarter in gl.static_range(4):
            state_SV = state_tile.slice(quarter * (K // 4), K // 4).load(dense).to(gl.float32)
            overlap_SV += state_SV * dstate_tile.slice(quarter * (K // 4), K // 4).load(dense).to(gl.float32)
        overlap = gl.sum(gl.sum(overlap_SV, axis=1), axis=0)
        query_CK, erase_CK = warpgroup_mma_wait(0, deps=(query_CK, erase_CK))
        # Every warp has read S and v, and written E, F and the pairs.
        gl.thread_barrier()
        mbarrier.expect(state_ready, 2 * K * V, pred=more)
        tma.async_copy_global_to_shared(states, [next_table * K, 0], state_ready, state_tile, pred=more)
        mbarrier.expect(value_ready, 2 * C * V, pred=more)
        tma.async_copy_global_to_shared(v, [next_start, next_u * V], value_ready, v_tile, pred=more)

        grown_C = gl.exp(decay_C)
        query_CK = query_CK * (scale * grown_C * q_factor_C)[:, None]
        read_C = gl.sum(query_CK * q_tile.load(wide).to(gl.float32), axis=1)
        dq_CK += query_CK
        keep_CK = warpgroup_mma(x_tile, dstate_tile.permute((1, 0)), zero_CK, use_acc=False, is_async=True)
        erase_CK = erase_CK * (-grown_C * divisor_C * k_factor_C)[:, None]
        k_CK = k_tile.load(wide).to(gl.float32)
        erased_C = gl.sum(erase_CK * k_CK, axis=1)
        dk_CK += erase_CK
        token = (start + row) * U + u
        gl.store(dbeta + token, seen_C + (erased_C + erased_pairs_C) / divisor_C, mask=row < length)
        gl.store(sums + vector + row, read_C + erased_C)
        keep_CK = warpgroup_mma_wait(0, deps=[keep_CK])
        # Every warp has read X, do, dU and dS'.
        gl.thread_barrier()
        mbarrier.expect(rows_ready, 6 * C * V, pred=more)
        tma.async_copy_global_to_shared(updates, [next_table * C, 0], rows_ready, x_tile, pred=more)
        tma.async_copy_global_to_shared(do, [next_start, next_u * V], rows_ready, do_tile, pred=more)
        tma.async_copy_global_to_shared(dupdates, [next_table * C, 0], rows_ready, du_tile, pred=more)
        mbarrier.expect(dstate_ready, 2 * K * V, pred=more)
        tma.async_copy_global_to_shared(dstates, [next_table * K, 0], dstate_ready, dstate_tile, pred=more)

        keep_CK = keep_CK * (gl.exp((total - decay_C) + (total_rest - rest_C)) * k_factor_C)[:, None]
        gl.store(sums + plane + vector + row, gl.sum(keep_CK * k_CK, axis=1))
        dk_CK += keep_CK
        later_CC = warpgroup_mma(one_tile, pair_tile, zero_CC, use_acc=False, is_async=True)
        dq_CK = warpgroup_mma(e_tile, k_tile, dq_CK, is_async=True)
        dk_CK = warpgroup_mma(f_tile, k_tile, dk_CK, is_async=True)
        dk_CK = warpgroup_mma(e_tile.permute((1, 0)), q_tile, dk_CK, is_async=True)
        dk_CK = warpgroup_mma(f_tile.permute((1, 0)), k_tile, dk_CK, is_async=True)
        later_CC = warpgroup_mma_wait(4, deps=[later_CC])
        passing_C = gl.sum(gl.where(strict, later_CC, 0.0), axis=1)
        gl.store(sums + 2 * plane + vector + square_row, passing_C)
        gl.store(chunk_gains + table, overlap * gl.exp(total))
        dq_CK, dk_CK = warpgroup_mma_wait(0, deps=(dq_CK, dk_CK))
        # Every warp has read E, F and the pairs.
        gl.thread_barrier()

        if member == GROUP - 1:
            if L2NORM:
                q_CK = q_tile.load(wide).to(gl.float32)
                along_q_C = gl.sum(dq_CK * q_CK, axis=1) * q_factor_C * q_factor_C
                dq_CK -= q_CK * along_q_C[:, None]
                k_CK = k_tile.load(wide).to(gl.float32)
                along_k_C = gl.sum(dk_CK * k_CK, axis=1) * k_factor_C * k_factor_C
                dk_CK -= k_CK * along_k_C[:, None]
            # Every warp has read q and k.
            gl.thread_barrier()
            mbarrier.expect(keys_ready, 4 * C * K, pred=more)
            tma.async_copy_global_to_shared(q, [next_start, next_head * K], keys_ready, q_tile, pred=more)
            tma.async_copy_global_to_shared(k, [next_start, next_head * K], keys_ready, k_tile, pred=more)
            place = (start.to(gl.int64) * H + head) * K + (
                dense_row[:, None] * (H * K) + dense_column[None, :]
            )
            inside = (dense_row < length)[:, None]
            gl.store(dq + place, gl.convert_layout(dq_CK.to(gl.bfloat16), dense), mask=inside)
            gl.store(dk + place, gl.convert_layout(dk_CK.to(gl.bfloat16), dense), mask=inside)
            dq_CK = zero_CK
            dk_CK = zero_CK

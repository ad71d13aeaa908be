"""Gradients of the gated delta rule's inputs for Hopper.

`delta_gradients` as one persistent program a multiprocessor. Axes, names and formulas as in
`delta_gradients`. A program walks over items (one chunk of one key head) and, in each, over the GROUP value
heads; that is its sequence of jobs. Each tile has one place in shared memory, and the copy engine fills it
for the next job as soon as this one has used it: the loads of one job run under the products of the other.
Two warp groups share the columns of every product. Rows past the end of a sequence hold other tokens' values;
the factors in the tables make them 0 wherever they would count, if they are finite: a NaN or infinity of the
next sequence reaches a short last chunk, and from its gradients those of all chunks before it.
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
    step: gl.tensor,
    q_factor: gl.tensor,
    k_factor: gl.tensor,
    dq: gl.tensor,
    dk: gl.tensor,
    dv: gl.tensor,
    row_gains: gl.tensor,
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
    row = gl.arange(0, C, layout=gl.SliceLayout(1, wide))
    square_rows: gl.constexpr = gl.SliceLayout(1, square)
    square_row = gl.arange(0, C, layout=square_rows)
    square_column = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    dense_row = gl.arange(0, C, layout=gl.SliceLayout(1, dense))
    dense_column = gl.arange(0, K, layout=gl.SliceLayout(0, dense))

    q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], q.layout)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], k.layout)
    v_tile = gl.allocate_shared_memory(gl.bfloat16, [C, V], v.layout)
    do_tile = gl.allocate_shared_memory(gl.bfloat16, [C, V], do.layout)
    x_tile = gl.allocate_shared_memory(gl.bfloat16, [C, V], updates.layout)
    du_tile = gl.allocate_shared_memory(gl.bfloat16, [C, V], dupdates.layout)
    state_tile = gl.allocate_shared_memory(gl.bfloat16, [K, V], states.layout)
    dstate_tile = gl.allocate_shared_memory(gl.bfloat16, [K, V], dstates.layout)
    pair: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    e_shared = gl.allocate_shared_memory(gl.bfloat16, [C, C], pair)
    f_shared = gl.allocate_shared_memory(gl.bfloat16, [C, C], pair)
    et_shared = gl.allocate_shared_memory(gl.bfloat16, [C, C], pair)
    ft_shared = gl.allocate_shared_memory(gl.bfloat16, [C, C], pair)
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
    tma.async_copy_global_to_shared(q, [start, head * K], keys_ready, q_tile, pred=more)
    tma.async_copy_global_to_shared(k, [start, head * K], keys_ready, k_tile, pred=more)
    mbarrier.expect(rows_ready, 6 * C * V, pred=more)
    tma.async_copy_global_to_shared(updates, [table * C, 0], rows_ready, x_tile, pred=more)
    tma.async_copy_global_to_shared(do, [start, u * V], rows_ready, do_tile, pred=more)
    tma.async_copy_global_to_shared(dupdates, [table * C, 0], rows_ready, du_tile, pred=more)
    mbarrier.expect(state_ready, 2 * K * V, pred=more)
    tma.async_copy_global_to_shared(states, [table * K, 0], state_ready, state_tile, pred=more)
    mbarrier.expect(value_ready, 2 * C * V, pred=more)
    tma.async_copy_global_to_shared(v, [start, u * V], value_ready, v_tile, pred=more)
    mbarrier.expect(dstate_ready, 2 * K * V, pred=more)
    tma.async_copy_global_to_shared(dstates, [table * K, 0], dstate_ready, dstate_tile, pred=more)

    zero_CC = gl.zeros([C, C], gl.float32, layout=square)
    zero_CK = gl.zeros([C, K], gl.float32, layout=wide)
    dq_CK = zero_CK
    dk_CK = zero_CK
    count = (items - item + stride - 1) // stride
    for job in range(count * GROUP):
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
        decay_C = gl.load(decay + vector + row)
        beta_C = gl.load(step + vector + row)
        k_factor_C = gl.load(k_factor + keys + row)
        q_factor_C = gl.load(q_factor + keys + row)
        divisor_C = gl.maximum(beta_C, 1e-12)
        # Rows lie in the same threads in both layouts.
        down_C = gl.convert_layout(decay_C, square_rows, assert_trivial=True)
        down_q_C = gl.convert_layout(q_factor_C * scale, square_rows, assert_trivial=True)
        down_k_C = gl.convert_layout(k_factor_C, square_rows, assert_trivial=True)
        down_beta_C = gl.convert_layout(divisor_C, square_rows, assert_trivial=True)
        across_C = gl.load(decay + vector + square_column)
        across_k_C = gl.load(k_factor + keys + square_column)
        across_q_C = gl.load(q_factor + keys + square_column) * scale
        across_beta_C = gl.maximum(gl.load(step + vector + square_column), 1e-12)

        mbarrier.wait(rows_ready, phase)
        e_CC = warpgroup_mma(do_tile, x_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        f_CC = warpgroup_mma(du_tile, x_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        et_CC = warpgroup_mma(x_tile, do_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        ft_CC = warpgroup_mma(x_tile, du_tile.permute((1, 0)), zero_CC, use_acc=False, is_async=True)
        lower = square_row[:, None] >= square_column[None, :]
        upper = square_row[:, None] <= square_column[None, :]
        gap_CC = down_C[:, None] - across_C[None, :]
        ratio_CC = gl.exp(gl.where(lower, gap_CC, float("-inf")))
        ratio_t_CC = gl.exp(gl.where(upper, -gap_CC, float("-inf")))
        strict = square_row[:, None] != square_column[None, :]
        e_CC, f_CC, et_CC, ft_CC = warpgroup_mma_wait(0, deps=(e_CC, f_CC, et_CC, ft_CC))
        e_CC = e_CC * ratio_CC * down_q_C[:, None] * across_k_C[None, :]
        e_shared.store(e_CC.to(gl.bfloat16))
        et_CC = et_CC * ratio_t_CC * across_q_C[None, :] * down_k_C[:, None]
        et_shared.store(et_CC.to(gl.bfloat16))
        f_CC = f_CC * ratio_CC * (down_beta_C * down_k_C)[:, None] * across_k_C[None, :]
        f_shared.store(gl.where(strict, f_CC, 0.0).to(gl.bfloat16))
        ft_CC = ft_CC * ratio_t_CC * (-across_beta_C * across_k_C)[None, :] * down_k_C[:, None]
        ft_shared.store(gl.where(strict, ft_CC, 0.0).to(gl.bfloat16))
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
        keep_CK = warpgroup_mma(x_tile, dstate_tile.permute((1, 0)), zero_CK, use_acc=False, is_async=True)
        # Every warp has read S and v.
        gl.thread_barrier()
        mbarrier.expect(state_ready, 2 * K * V, pred=more)
        tma.async_copy_global_to_shared(states, [next_table * K, 0], state_ready, state_tile, pred=more)
        mbarrier.expect(value_ready, 2 * C * V, pred=more)
        tma.async_copy_global_to_shared(v, [next_start, next_u * V], value_ready, v_tile, pred=more)

        grown_C = gl.exp(decay_C)
        mbarrier.wait(keys_ready, (job // GROUP) & 1)
        query_CK = query_CK * (scale * grown_C * q_factor_C)[:, None]
        erase_CK = erase_CK * (grown_C * divisor_C * k_factor_C)[:, None]
        keep_CK = warpgroup_mma_wait(0, deps=[keep_CK])
        query_CK = warpgroup_mma(e_shared, k_tile, query_CK, is_async=True)
        erase_CK = warpgroup_mma(f_shared, k_tile, erase_CK, is_async=True)
        # Every warp has read X, do, dU and dS'.
        gl.thread_barrier()
        mbarrier.expect(rows_ready, 6 * C * V, pred=more)
        tma.async_copy_global_to_shared(updates, [next_table * C, 0], rows_ready, x_tile, pred=more)
        tma.async_copy_global_to_shared(do, [next_start, next_u * V], rows_ready, do_tile, pred=more)
        tma.async_copy_global_to_shared(dupdates, [next_table * C, 0], rows_ready, du_tile, pred=more)
        mbarrier.expect(dstate_ready, 2 * K * V, pred=more)
        tma.async_copy_global_to_shared(dstates, [next_table * K, 0], dstate_ready, dstate_tile, pred=more)

        k_CK = k_tile.load(wide).to(gl.float32)
        keep_CK = keep_CK * (gl.exp(total - decay_C) * k_factor_C)[:, None]
        gain = overlap * gl.exp(total) + gl.sum(gl.sum(keep_CK * k_CK, axis=1), axis=0)
        keep_CK = warpgroup_mma(et_shared, q_tile, keep_CK, is_async=True)
        keep_CK = warpgroup_mma(ft_shared, k_tile, keep_CK, is_async=True)
        query_CK, erase_CK = warpgroup_mma_wait(2, deps=(query_CK, erase_CK))
        dq_CK += query_CK
        gains_CK = query_CK * q_tile.load(wide).to(gl.float32)
        k_CK = k_tile.load(wide).to(gl.float32)
        erased_CK = erase_CK * k_CK
        token = (start + row) * U + u
        gl.store(dbeta + token, seen_C - gl.sum(erased_CK, axis=1) / divisor_C, mask=row < length)
        gains_CK -= erased_CK
        dk_CK -= erase_CK
        keep_CK = warpgroup_mma_wait(0, deps=[keep_CK])
        dk_CK += keep_CK
        gl.store(row_gains + vector + row, gl.sum(gains_CK - keep_CK * k_CK, axis=1))
        gl.store(chunk_gains + table, gain)

        if member == GROUP - 1:
            if L2NORM:
                q_CK = q_tile.load(wide).to(gl.float32)
                along_q_C = gl.sum(dq_CK * q_CK, axis=1) * q_factor_C * q_factor_C
                dq_CK -= q_CK * along_q_C[:, None]
                along_k_C = gl.sum(dk_CK * k_CK, axis=1) * k_factor_C * k_factor_C
                dk_CK -= k_CK * along_k_C[:, None]
            place = (start.to(gl.int64) * H + head) * K + (
                dense_row[:, None] * (H * K) + dense_column[None, :]
            )
            inside = (dense_row < length)[:, None]
            gl.store(dq + place, gl.convert_layout(dq_CK.to(gl.bfloat16), dense), mask=inside)
            gl.store(dk + place, gl.convert_layout(dk_CK.to(gl.bfloat16), dense), mask=inside)
            dq_CK = zero_CK
            dk_CK = zero_CK
            # Every warp has read q and k.
            gl.thread_barrier()
            mbarrier.expect(keys_ready, 4 * C * K, pred=more)
            tma.async_copy_global_to_shared(q, [next_start, next_head * K], keys_ready, q_tile, pred=more)
            tma.async_copy_global_to_shared(k, [next_start, next_head * K], keys_ready, k_tile, pred=more)

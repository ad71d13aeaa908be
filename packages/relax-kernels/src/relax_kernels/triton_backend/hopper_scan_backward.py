"""The backward scan of the gated delta rule for Hopper.

`delta_scan_backward` with bulk copies and asynchronous products. Axes and formulas as in
`delta_scan_backward`, tiles as in `hopper_scan`.
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
def scan_backward_kernel(
    q: tma.tensor_descriptor,
    k: tma.tensor_descriptor,
    do: tma.tensor_descriptor,
    inverse: tma.tensor_descriptor,
    scores: tma.tensor_descriptor,
    dstates: tma.tensor_descriptor,
    dupdates: tma.tensor_descriptor,
    decay: gl.tensor,
    rest: gl.tensor,
    step: gl.tensor,
    q_factor: gl.tensor,
    k_factor: gl.tensor,
    dinitial: gl.tensor,
    dfinal: gl.tensor,
    cu_seqlens: gl.tensor,
    chunk_offsets: gl.tensor,
    scale: gl.tensor,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    B: gl.constexpr,
    WN: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DFINAL: gl.constexpr,
    WRITE_DINITIAL: gl.constexpr,
) -> None:
    """Scan one sequence of one value head backwards for B value features; grid (N * U * V / B,)."""
    U: gl.constexpr = H * GROUP
    parts: gl.constexpr = V // B
    part = gl.program_id(0) % parts
    u = (gl.program_id(0) // parts) % U
    n = gl.program_id(0) // (parts * U)
    head = u // GROUP
    begin = gl.load(cu_seqlens + n)
    length = gl.load(cu_seqlens + n + 1) - begin
    first = gl.load(chunk_offsets + n)
    chunks = (length + C - 1) // C

    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WN], [16, B // WN, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    row = gl.arange(0, C, layout=rows)
    k_row = gl.arange(0, K, layout=rows)
    column = part * B + gl.arange(0, B, layout=columns)
    tile_KV = k_row[:, None] * V + column[None, :]

    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], q.layout)
    k_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], k.layout)
    do_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, B], do.layout)
    inverse_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], inverse.layout)
    scores_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], scores.layout)
    dstate_shared = gl.allocate_shared_memory(gl.bfloat16, [K, B], dstates.layout)
    dx_shared = gl.allocate_shared_memory(gl.bfloat16, [C, B], do.layout)
    du_shared = gl.allocate_shared_memory(gl.bfloat16, [C, B], do.layout)
    seen_shared = gl.allocate_shared_memory(gl.bfloat16, [C, B], do.layout)
    nbytes: gl.constexpr = 2 * (2 * C * K + C * B + 2 * C * C)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    for s in gl.static_range(STAGES):
        more = s < chunks
        tile = ((first + chunks - 1 - s) * U + u) * C
        token = begin + (chunks - 1 - s) * C
        bar = ready.index(s)
        mbarrier.expect(bar, nbytes, pred=more)
        tma.async_copy_global_to_shared(k, [token, head * K], bar, k_buffer.index(s), pred=more)
        tma.async_copy_global_to_shared(do, [token, u * V + part * B], bar, do_buffer.index(s), pred=more)
        tma.async_copy_global_to_shared(scores, [tile, 0], bar, scores_buffer.index(s), pred=more)
        tma.async_copy_global_to_shared(inverse, [tile, 0], bar, inverse_buffer.index(s), pred=more)
        tma.async_copy_global_to_shared(q, [token, head * K], bar, q_buffer.index(s), pred=more)

    if HAS_DFINAL:
        dstate_KV = gl.load(dfinal + (n * U + u).to(gl.int64) * (K * V) + tile_KV).to(gl.float32)
    else:
        dstate_KV = gl.zeros([K, B], gl.float32, layout=mma)
    zero_CV = gl.zeros([C, B], gl.float32, layout=mma)

    for back in range(chunks):
        i = chunks - 1 - back
        stage = back % STAGES
        phase = (back // STAGES) & 1
        vector = ((first + i) * U + u) * C
        keys = ((first + i) * H + head) * C
        decay_C = gl.load(decay + vector + row)
        rest_C = gl.load(rest + vector + row)
        total = gl.load(decay + vector + (C - 1))
        to_end_C = (total - decay_C) + (gl.load(rest + vector + (C - 1)) - rest_C)
        beta_C = gl.load(step + vector + row)
        q_factor_C = gl.load(q_factor + keys + row)
        k_factor_C = gl.load(k_factor + keys + row)

        # The copies out of shared memory are over for the thread that issued them, then for all.
        tma.store_wait(0)
        gl.thread_barrier()
        dstate_shared.store(dstate_KV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(ready.index(stage), phase)
        k_tile = k_buffer.index(stage)
        if length - i * C < C:
            clear_rows(k_tile, length - i * C, C, K, 4 * WN)
            clear_rows(q_buffer.index(stage), length - i * C, C, K, 4 * WN)
            clear_rows(do_buffer.index(stage), length - i * C, C, B, 4 * WN)
            fence_async_shared()
            gl.thread_barrier()
        tma.async_copy_shared_to_global(dstates, [((first + i) * U + u) * K, part * B], dstate_shared)
        dx_CV = warpgroup_mma(k_tile, dstate_shared, zero_CV, use_acc=False, is_async=True)
        more_CV = warpgroup_mma(
            scores_buffer.index(stage).permute((1, 0)),
            do_buffer.index(stage),
            zero_CV,
            use_acc=False,
            is_async=True,
        )
        do_CV = do_buffer.index(stage).load(mma).to(gl.float32)
        grown_C = gl.exp(decay_C)
        seen_shared.store((do_CV * (scale * grown_C * q_factor_C)[:, None]).to(gl.bfloat16))
        dx_CV, more_CV = warpgroup_mma_wait(0, deps=(dx_CV, more_CV))
        dx_CV = dx_CV * (gl.exp(to_end_C) * k_factor_C)[:, None] + more_CV
        dx_shared.store(dx_CV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        du_CV = warpgroup_mma(
            inverse_buffer.index(stage).permute((1, 0)), dx_shared, zero_CV, use_acc=False, is_async=True
        )
        dstate_KV = dstate_KV * gl.exp(total)
        dstate_KV = warpgroup_mma(
            q_buffer.index(stage).permute((1, 0)), seen_shared, dstate_KV, is_async=True
        )
        du_CV = warpgroup_mma_wait(1, deps=[du_CV])
        du_shared.store(du_CV.to(gl.bfloat16))
        erased_CV = du_CV * (-beta_C * grown_C * k_factor_C)[:, None]
        # dx was read by the product that du waited for.
        gl.thread_barrier()
        dx_shared.store(erased_CV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(dupdates, [vector, part * B], du_shared)
        dstate_KV = warpgroup_mma_wait(0, deps=[dstate_KV])
        dstate_KV = warpgroup_mma(k_tile.permute((1, 0)), dx_shared, dstate_KV, is_async=True)
        dstate_KV = warpgroup_mma_wait(0, deps=[dstate_KV])

        # Every warp is done with this stage's tiles before they are filled again.
        gl.thread_barrier()
        j = back + STAGES
        more = j < chunks
        tile = ((first + chunks - 1 - j) * U + u) * C
        token = begin + (chunks - 1 - j) * C
        bar = ready.index(stage)
        mbarrier.expect(bar, nbytes, pred=more)
        tma.async_copy_global_to_shared(k, [token, head * K], bar, k_tile, pred=more)
        tma.async_copy_global_to_shared(do, [token, u * V + part * B], bar, do_buffer.index(stage), pred=more)
        tma.async_copy_global_to_shared(scores, [tile, 0], bar, scores_buffer.index(stage), pred=more)
        tma.async_copy_global_to_shared(inverse, [tile, 0], bar, inverse_buffer.index(stage), pred=more)
        tma.async_copy_global_to_shared(q, [token, head * K], bar, q_buffer.index(stage), pred=more)

    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
    tma.store_wait(0)
    if WRITE_DINITIAL:
        gl.store(dinitial + (n * U + u).to(gl.int64) * (K * V) + tile_KV, dstate_KV)

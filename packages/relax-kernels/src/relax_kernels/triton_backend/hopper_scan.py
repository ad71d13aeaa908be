"""The scans of the gated delta rule for Hopper: `delta_scan` with bulk copies and asynchronous products.

Axes and formulas as in `delta_scan`. Tiles come by the bulk copy engine, STAGES chunks ahead. At the end of a
sequence the last tile may hold tokens of the next one. Their factors (beta, 1 / |q|, 1 / |k|) in the tables
are 0, but 0 times a NaN or infinity is none: `clear_rows` takes them out where a product would sum over them,
in short chunks only. WN: warp groups side by side along the value features; one warp group has 4 warps.
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
def clear_rows(
    tile: gl.shared_memory_descriptor,
    length: gl.tensor,
    C: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """Set the rows of a [C, D] tile in shared memory from `length` on to 0; fence and barrier must follow."""
    dense: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, dense))
    for part in gl.static_range(C // 16):
        piece = tile.slice(part * 16, 16)
        inside = (part * 16 + row < length)[:, None]
        piece.store(gl.where(inside, piece.load(dense), 0.0))


@gluon_jit
def scan_kernel(
    q: tma.tensor_descriptor,
    k: tma.tensor_descriptor,
    v: tma.tensor_descriptor,
    inverse: tma.tensor_descriptor,
    scores: tma.tensor_descriptor,
    states: tma.tensor_descriptor,
    updates: tma.tensor_descriptor,
    decay: gl.tensor,
    rest: gl.tensor,
    step: gl.tensor,
    q_factor: gl.tensor,
    k_factor: gl.tensor,
    o: gl.tensor,
    initial: gl.tensor,
    final: gl.tensor,
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
    HAS_INITIAL: gl.constexpr,
    WRITE_FINAL: gl.constexpr,
    WRITE_OUTPUT: gl.constexpr,
    WRITE_STATES: gl.constexpr,
) -> None:
    """Scan one sequence of one value head for B value features; grid (N * U * V / B,)."""
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
    dense: gl.constexpr = gl.BlockedLayout([1, 8], [256 // B, B // 8], [4 * WN, 1], [1, 0])
    row = gl.arange(0, C, layout=rows)
    k_row = gl.arange(0, K, layout=rows)
    column = part * B + gl.arange(0, B, layout=columns)
    tile_KV = k_row[:, None] * V + column[None, :]

    k_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], k.layout)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, B], v.layout)
    inverse_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], inverse.layout)
    state_shared = gl.allocate_shared_memory(gl.bfloat16, [K, B], states.layout)
    wanted_shared = gl.allocate_shared_memory(gl.bfloat16, [C, B], v.layout)
    x_shared = gl.allocate_shared_memory(gl.bfloat16, [C, B], v.layout)
    if WRITE_OUTPUT:
        q_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], q.layout)
        scores_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], scores.layout)
    nbytes: gl.constexpr = 2 * C * (2 * (K + C) + B if WRITE_OUTPUT else K + C + B)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    for s in gl.static_range(STAGES):
        more = s < chunks
        tile = ((first + s) * U + u) * C
        mbarrier.expect(ready.index(s), nbytes, pred=more)
        token = begin + s * C
        tma.async_copy_global_to_shared(k, [token, head * K], ready.index(s), k_buffer.index(s), pred=more)
        tma.async_copy_global_to_shared(
            v, [token, u * V + part * B], ready.index(s), v_buffer.index(s), pred=more
        )
        tma.async_copy_global_to_shared(
            inverse, [tile, 0], ready.index(s), inverse_buffer.index(s), pred=more
        )
        if WRITE_OUTPUT:
            tma.async_copy_global_to_shared(
                q, [token, head * K], ready.index(s), q_buffer.index(s), pred=more
            )
            tma.async_copy_global_to_shared(
                scores, [tile, 0], ready.index(s), scores_buffer.index(s), pred=more
            )

    if HAS_INITIAL:
        state_KV = gl.load(initial + (n * U + u).to(gl.int64) * (K * V) + tile_KV).to(gl.float32)
    else:
        state_KV = gl.zeros([K, B], gl.float32, layout=mma)
    zero_CV = gl.zeros([C, B], gl.float32, layout=mma)

    for i in range(chunks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        vector = ((first + i) * U + u) * C
        keys = ((first + i) * H + head) * C
        decay_C = gl.load(decay + vector + row)
        rest_C = gl.load(rest + vector + row)
        total = gl.load(decay + vector + (C - 1))
        to_end_C = (total - decay_C) + (gl.load(rest + vector + (C - 1)) - rest_C)
        beta_C = gl.load(step + vector + row)
        k_factor_C = gl.load(k_factor + keys + row)

        if WRITE_STATES:
            # The copies out of shared memory are over for the thread that issued them, then for all.
            tma.store_wait(0)
            gl.thread_barrier()
        state_shared.store(state_KV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(ready.index(stage), phase)
        k_tile = k_buffer.index(stage)
        if length - i * C < C:
            # Not q: its rows only make rows of o, which are not written.
            clear_rows(k_tile, length - i * C, C, K, 4 * WN)
            clear_rows(v_buffer.index(stage), length - i * C, C, B, 4 * WN)
            fence_async_shared()
            gl.thread_barrier()
        if WRITE_STATES:
            tma.async_copy_shared_to_global(states, [((first + i) * U + u) * K, part * B], state_shared)
        recalled_CV = warpgroup_mma(k_tile, state_shared, zero_CV, use_acc=False, is_async=True)
        if WRITE_OUTPUT:
            o_CV = warpgroup_mma(q_buffer.index(stage), state_shared, zero_CV, use_acc=False, is_async=True)
            q_factor_C = gl.load(q_factor + keys + row)
            recalled_CV = warpgroup_mma_wait(1, deps=[recalled_CV])
        else:
            recalled_CV = warpgroup_mma_wait(0, deps=[recalled_CV])
        v_CV = v_buffer.index(stage).load(mma).to(gl.float32)
        wanted_CV = (v_CV - recalled_CV * (gl.exp(decay_C) * k_factor_C)[:, None]) * beta_C[:, None]
        wanted_shared.store(wanted_CV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        x_CV = warpgroup_mma(
            inverse_buffer.index(stage), wanted_shared, zero_CV, use_acc=False, is_async=True
        )
        state_KV = state_KV * gl.exp(total)
        if WRITE_OUTPUT:
            x_CV, o_CV = warpgroup_mma_wait(0, deps=(x_CV, o_CV))
        else:
            x_CV = warpgroup_mma_wait(0, deps=[x_CV])
        x_shared.store(x_CV.to(gl.bfloat16))
        carried_CV = x_CV * (gl.exp(to_end_C) * k_factor_C)[:, None]
        wanted_shared.store(carried_CV.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        if WRITE_STATES:
            tma.async_copy_shared_to_global(updates, [vector, part * B], x_shared)
        if WRITE_OUTPUT:
            o_CV = o_CV * (scale * gl.exp(decay_C) * q_factor_C)[:, None]
            o_CV = warpgroup_mma(scores_buffer.index(stage), x_shared, o_CV, is_async=True)
            state_KV = warpgroup_mma(k_tile.permute((1, 0)), wanted_shared, state_KV, is_async=True)
            o_CV = warpgroup_mma_wait(1, deps=[o_CV])
            o_dense = gl.convert_layout(o_CV.to(gl.bfloat16), dense)
            o_row = gl.arange(0, C, layout=gl.SliceLayout(1, dense))
            o_column = gl.arange(0, B, layout=gl.SliceLayout(0, dense))
            place = o + ((begin + i * C).to(gl.int64) * U + u) * V + part * B
            place += o_row[:, None] * (U * V) + o_column[None, :]
            gl.store(place, o_dense, mask=(o_row < length - i * C)[:, None])
        else:
            state_KV = warpgroup_mma(k_tile.permute((1, 0)), wanted_shared, state_KV, is_async=True)
        state_KV = warpgroup_mma_wait(0, deps=[state_KV])

        # Every warp is done with this stage's tiles before they are filled again.
        gl.thread_barrier()
        j = i + STAGES
        more = j < chunks
        tile = ((first + j) * U + u) * C
        token = begin + j * C
        bar = ready.index(stage)
        mbarrier.expect(bar, nbytes, pred=more)
        tma.async_copy_global_to_shared(k, [token, head * K], bar, k_tile, pred=more)
        tma.async_copy_global_to_shared(v, [token, u * V + part * B], bar, v_buffer.index(stage), pred=more)
        tma.async_copy_global_to_shared(inverse, [tile, 0], bar, inverse_buffer.index(stage), pred=more)
        if WRITE_OUTPUT:
            tma.async_copy_global_to_shared(q, [token, head * K], bar, q_buffer.index(stage), pred=more)
            tma.async_copy_global_to_shared(scores, [tile, 0], bar, scores_buffer.index(stage), pred=more)

    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
    if WRITE_STATES:
        tma.store_wait(0)
    if WRITE_FINAL:
        gl.store(final + (n * U + u).to(gl.int64) * (K * V) + tile_KV, state_KV)

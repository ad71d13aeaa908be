"""The sequence of fla_npu's chunked kernels, forward and backward.

T tokens, U value heads, K key dim, V value dim, C tokens of a chunk. Everything is [1, U, T, ...] here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from relax_npu.operators.delta_chunks import CHUNK, Chunks, inverse, summed_decay
from relax_npu.operators.typed import apply

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens


def run(
    q_TUK: torch.Tensor,
    k_TUK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    cu_seqlens: CuSeqlens,
    scale: float,
) -> torch.Tensor:
    """Return o_TUV without states, with gradients."""
    o: torch.Tensor = apply(
        _DeltaRule, q_TUK, k_TUK, v_TUV, g_TU, beta_TU, Chunks.of(cu_seqlens, q_TUK.device), scale
    )
    return o


def heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return [1, U, T, ...] of each [T, U, ...]."""
    return tuple(x.transpose(0, 1).contiguous()[None] for x in tensors)


def forward_kernels(
    inputs: tuple[torch.Tensor, ...],
    chunks: Chunks,
    scale: float,
    initial: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run the forward kernels. Returns o [1, U, T, V], the inverse A [1, U, T, C] and the final states."""
    q, k, v, decay, beta = inputs
    A = inverse(k[0], beta[0], decay[0], chunks)[None]
    h, v_new, final = _states(k, v, decay, beta, A, chunks, initial, output_final_state)
    o: torch.Tensor = torch.ops.npu.npu_chunk_fwd_o(
        q,
        k,
        v_new,
        h,
        scale,
        g=decay,
        cu_seqlens=chunks.starts,
        chunk_indices=chunks.indices,
        chunk_size=CHUNK,
    )
    return o, A, final


def _states(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    chunks: Chunks,
    initial: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    w, u = _wy(k, v, decay, beta, A, chunks)
    h, v_new, final = torch.ops.npu.npu_chunk_gated_delta_rule_fwd_h(
        k,
        w,
        u,
        decay,
        initial_state=initial,
        output_final_state=output_final_state,
        chunk_size=CHUNK,
        save_new_value=True,
        cu_seqlens=chunks.starts,
        chunk_indices=chunks.indices,
    )
    return h, v_new, final if output_final_state else None


def _wy(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, A: torch.Tensor, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    w, u = torch.ops.npu.npu_recompute_w_u_fwd(
        k, v, beta, A, CHUNK, g=decay, cu_seqlens=chunks.starts, chunk_indices=chunks.indices
    )
    return w, u


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TUK: torch.Tensor,
        k_TUK: torch.Tensor,
        v_TUV: torch.Tensor,
        g_TU: torch.Tensor,
        beta_TU: torch.Tensor,
        chunks: Chunks,
        scale: float,
    ) -> torch.Tensor:
        q, k, v, g, beta = heads_first(q_TUK, k_TUK, v_TUV, g_TU.float(), beta_TU.float())
        decay = summed_decay(g[0], chunks)[None]
        o, A, _ = forward_kernels((q, k, v, decay, beta), chunks, scale)
        ctx.save_for_backward(q, k, v, decay, beta, A)
        ctx.chunks, ctx.scale, ctx.dtypes = chunks, scale, (g_TU.dtype, beta_TU.dtype)
        return o[0].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, do_TUV: torch.Tensor) -> Any:
        q, k, v, decay, beta, A = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        (do,) = heads_first(do_TUV)
        w, _ = _wy(k, v, decay, beta, A, chunks)
        h, v_new, _ = _states(k, v, decay, beta, A, chunks)
        dv = torch.ops.npu.npu_chunk_bwd_dv_local(
            q, k, do, decay, ctx.scale, CHUNK, cu_seqlens=chunks.starts, chunk_indices=chunks.indices
        )
        dh, _, dv = torch.ops.npu.npu_chunk_gated_delta_rule_bwd_dhu(
            q, k, w, do, dv, ctx.scale, CHUNK, g=decay, cu_seqlens=chunks.starts, chunk_indices=chunks.indices
        )
        dq, dk, dw, ddecay = torch.ops.npu.npu_chunk_bwd_dqkwg(
            q,
            k,
            v_new,
            decay,
            h,
            do,
            dh,
            dv,
            CHUNK,
            scale=ctx.scale,
            cu_seqlens=chunks.starts,
            chunk_indices=chunks.indices,
        )
        dA = torch.ops.npu.npu_prepare_wy_repr_bwd_da(
            k,
            v,
            beta,
            A,
            dw,
            dv,
            decay,
            chunk_size=CHUNK,
            cu_seqlens=chunks.starts,
            chunk_indices=chunks.indices,
        )
        dk_wy, dv, dbeta, ddecay_wy = torch.ops.npu.npu_prepare_wy_repr_bwd_full(
            k, v, beta, A, dA, dw, dv, decay, CHUNK, cu_seqlens=chunks.starts, chunk_indices=chunks.indices
        )
        dg = summed_decay((ddecay + ddecay_wy)[0], chunks, reverse=True)
        g_dtype, beta_dtype = ctx.dtypes
        dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk + dk_wy, dv))
        return dq, dk, dv, dg.T.to(g_dtype), dbeta[0].T.to(beta_dtype), None, None

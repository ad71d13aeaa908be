"""Gated delta rule over packed sequences: grids of chunks, l2norm, and their place in autograd.

T tokens, N sequences, M chunks of C tokens, H query/key heads, U value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.torch_backend import delta_chunks
from relax_kernels.torch_backend.chunks import ChunkLayout
from relax_kernels.torch_backend.delta_chunks import ChunkInputs, KeptChunks
from relax_kernels.torch_backend.delta_step import L2_EPS
from relax_kernels.torch_backend.typed import accumulation_dtype, apply

GRID_ELEMENTS = 2**18
"""Elements of the largest tensor of a grid, about: 1 MiB in float32 stays in cache."""


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    *,
    cu_seqlens: CuSeqlens,
    initial_state_NUKV: torch.Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `relax_kernels.gated_delta_rule`."""
    _, U, V = v_TUV.shape
    cells = max(1, GRID_ELEMENTS // max(1, U * max(V, q_THK.shape[2])))
    layout = ChunkLayout.of(cu_seqlens, cells, q_THK.device)
    tensors = (q_THK, k_THK, v_TUV, g_TU, beta_TU, initial_state_NUKV)
    result: tuple[torch.Tensor, torch.Tensor | None] = apply(
        _DeltaRule, *tensors, layout, len(cu_seqlens), scale, qk_l2norm, output_final_state
    )
    return result


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TUV: torch.Tensor,
        g_TU: torch.Tensor,
        beta_TU: torch.Tensor,
        initial_NUKV: torch.Tensor | None,
        layout: ChunkLayout,
        sequences: int,
        scale: float,
        l2norm: bool,
        with_final: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        working = accumulation_dtype(q_THK.dtype)
        inputs = (q_THK, k_THK, v_TUV, g_TU, beta_TU)
        final_NUKV = _final_states(v_TUV, q_THK.shape[2], initial_NUKV, sequences) if with_final else None
        spread = zip(*(layout.spread(tensor.to(working)) for tensor in inputs), strict=True)
        saved: list[torch.Tensor | None] = []
        outputs = []
        for grid, tensors in zip(layout.grids, spread, strict=True):
            q, k, v, g, beta = tensors
            q_inverse = k_inverse = None
            if l2norm:
                (q, q_inverse), (k, k_inverse) = _normalise(q), _normalise(k)
            x = ChunkInputs(q * scale, k, v, *delta_chunks.sums_within_chunks(g), beta)
            initial = None if initial_NUKV is None else initial_NUKV[grid.sequence_N].to(working)
            o, final, kept = delta_chunks.forward(grid, x, initial, with_final)
            outputs.append(o)
            if final_NUKV is not None:
                final_NUKV[grid.sequence_N] = final
            saved += [*x, *kept, q_inverse, k_inverse]
        o_TUV = layout.collect(outputs, v_TUV.shape[1:], v_TUV.dtype)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.scale, ctx.with_final = layout, scale, with_final
        ctx.like = tuple((tensor.shape[1:], tensor.dtype) for tensor in inputs)
        ctx.initial_like = None if initial_NUKV is None else (initial_NUKV.shape, initial_NUKV.dtype)
        return o_TUV, final_NUKV

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do_TUV: torch.Tensor, dfinal_NUKV: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        working = accumulation_dtype(do_TUV.dtype)
        dinitial = None
        if ctx.initial_like is not None:
            shape, dtype = ctx.initial_like
            # An empty sequence hands its initial state on as its final one.
            dinitial = (
                do_TUV.new_zeros(shape, dtype=dtype)
                if dfinal_NUKV is None
                else dfinal_NUKV.to(dtype, copy=True)
            )
        saved = iter(ctx.saved_tensors)
        parts = []
        for grid, do in zip(ctx.layout.grids, ctx.layout.spread(do_TUV.to(working)), strict=True):
            x = ChunkInputs(*(next(saved) for _ in range(6)))
            kept = KeptChunks(*(next(saved) for _ in range(4)))
            q_inverse, k_inverse = next(saved), next(saved)
            dfinal = None if dfinal_NUKV is None else dfinal_NUKV[grid.sequence_N]
            grad = delta_chunks.backward(grid, x, kept, do, dfinal, has_initial=dinitial is not None)
            dq, dk = grad.dq_MHCK, grad.dk_MHCK
            if q_inverse is not None:
                dq, dk = (
                    _normalise_back(dq, x.q_MHCK / ctx.scale, q_inverse),
                    _normalise_back(dk, x.k_MHCK, k_inverse),
                )
            dq = dq * ctx.scale
            parts.append((dq, dk, grad.dv_MUCV, grad.dg_MUC, grad.dbeta_MUC))
            if dinitial is not None and grad.dinitial_NUKV is not None:
                dinitial[grid.sequence_N] = grad.dinitial_NUKV.to(dinitial.dtype)
        grads = (ctx.layout.collect([part[i] for part in parts], *like) for i, like in enumerate(ctx.like))
        return (*grads, dinitial, None, None, None, None, None)


def _final_states(
    v_TUV: torch.Tensor, K: int, initial_NUKV: torch.Tensor | None, sequences: int
) -> torch.Tensor:
    """Final states before any token: what empty sequences keep."""
    working = accumulation_dtype(v_TUV.dtype)
    if initial_NUKV is not None:
        return initial_NUKV.to(working, copy=True)
    _, U, V = v_TUV.shape
    return v_TUV.new_zeros(sequences, U, K, V, dtype=working)


def _normalise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / sqrt(sum x^2 + eps) and that factor, which is unused where x has no entries."""
    inverse = (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_()
    return x * inverse, inverse


def _normalise_back(dy: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Gradient of x from that of y = x * inverse."""
    return torch.addcmul(dy, y, (y * dy).sum(-1, keepdim=True), value=-1).mul_(inverse)

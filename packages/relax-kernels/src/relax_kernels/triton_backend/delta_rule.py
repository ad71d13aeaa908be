"""Gated delta rule on CUDA: its place in autograd.

Axes as in `delta_scan`. Four steps (`delta_prepare`, `delta_scan`, `delta_scan_backward`, `delta_gradients`),
each with a kernel for any device; the last three also with one for Hopper. The forward pass keeps its inputs
and the tables (2 C values of the input dtype for each token and value head); the backward pass makes the
states again, 2 M U (K V + C V) values that are freed when it returns.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend import delta_launch
from relax_kernels.triton_backend.delta_problem import Problem, Tables, Trace
from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import dense_rows, on_device_of

try:
    from relax_kernels.triton_backend import hopper_launch
except ImportError:  # A release of Triton without the interface those kernels are written in.
    hopper_launch = None  # type: ignore[assignment]


def launches(problem: Problem) -> ModuleType:
    """Return the module whose kernels serve a problem best."""
    if hopper_launch is not None and hopper_launch.serves(problem):
        return hopper_launch
    return delta_launch


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
        lengths: CuSeqlens,
        output_final_state: bool,
        l2norm: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = tuple(dense_rows(x) for x in (q_THK, k_THK, v_TUV, g_TU, beta_TU))
        problem = Problem(inputs, lengths, l2norm, scale)
        initial = None if initial_NUKV is None else initial_NUKV.contiguous()
        o_TUV = problem.empty(*v_TUV.shape)
        final = None
        if output_final_state:
            final = problem.empty(
                len(lengths), v_TUV.shape[1], q_THK.shape[2], v_TUV.shape[2], dtype=torch.float32
            )
        with on_device_of(q_THK):
            tables = delta_launch.prepare(problem)
            launches(problem).scan(problem, tables, initial, output=o_TUV, final_NUKV=final)
        kept = (tables.inverse_MUCC, tables.scores_MUCC, *tables.vectors)
        ctx.save_for_backward(*inputs, initial, *kept)
        ctx.options = (lengths, l2norm, scale)
        ctx.set_materialize_grads(False)
        return o_TUV, final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do_TUV: torch.Tensor | None, dfinal_NUKV: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, initial = ctx.saved_tensors[:6]
        tables = Tables(*ctx.saved_tensors[6:])
        problem = Problem(tuple(inputs), *ctx.options)
        do = torch.zeros_like(problem.v_TUV) if do_TUV is None else dense_rows(do_TUV.to(problem.v_TUV.dtype))
        dfinal = None if dfinal_NUKV is None else dfinal_NUKV.contiguous()
        dinitial = None
        if initial is not None:
            dinitial = problem.empty(*initial.shape, dtype=torch.float32)
        with on_device_of(do):
            run = launches(problem)
            trace, dtrace = Trace.empty(problem), Trace.empty(problem)
            run.scan(problem, tables, initial, trace=trace)
            run.scan_backward(problem, tables, do, dfinal, dtrace, dinitial)
            dq, dk, dv, dg, dbeta = run.gradients(problem, tables, do, trace, dtrace)
        if dinitial is not None:
            dinitial = dinitial.to(initial.dtype)
        g, beta = inputs[3:]
        return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype), dinitial, None, None, None, None


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
    o_TUV, final_NUKV = apply(
        _DeltaRule,
        q_THK,
        k_THK,
        v_TUV,
        g_TU,
        beta_TU,
        initial_state_NUKV,
        cu_seqlens,
        output_final_state,
        qk_l2norm,
        scale,
    )
    return o_TUV, final_NUKV

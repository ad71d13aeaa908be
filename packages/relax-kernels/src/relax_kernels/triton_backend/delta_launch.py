"""Launches of the gated delta rule's kernels for any CUDA device. Axes as in `delta_scan`."""

from __future__ import annotations

import torch
import triton.language as tl

from relax_kernels.triton_backend.delta_gradients import gradients_kernel
from relax_kernels.triton_backend.delta_prepare import prepare_kernel
from relax_kernels.triton_backend.delta_problem import CHUNK, Problem, Tables, Trace
from relax_kernels.triton_backend.delta_scan import scan_kernel
from relax_kernels.triton_backend.delta_scan_backward import scan_backward_kernel
from relax_kernels.triton_backend.launch import multiprocessors

L2_EPS = 1e-6


def prepare(problem: Problem) -> Tables:
    """Make the tables of every chunk."""
    axes, table = problem.axes, problem.table
    H, U, M = axes["H"], axes["H"] * axes["GROUP"], table.chunks
    q, k, _, g, beta = problem.inputs
    tables = Tables(
        problem.empty(M, U, CHUNK, CHUNK),
        problem.empty(M, U, CHUNK, CHUNK),
        problem.empty(M, U, CHUNK, dtype=torch.float32),
        problem.empty(M, U, CHUNK, dtype=torch.float32),
        problem.empty(M, U, CHUNK, dtype=torch.float32),
        problem.empty(M, H, CHUNK, dtype=torch.float32),
        problem.empty(M, H, CHUNK, dtype=torch.float32),
    )
    # Of normalised keys and steps up to 1 no entry of the inverse exceeds 1: float16, with as many bits as
    # tf32.
    small = problem.l2norm and q.dtype == torch.bfloat16
    if M:
        prepare_kernel[(M * H,)](
            q,
            k,
            g,
            beta,
            tables.inverse_MUCC,
            tables.scores_MUCC,
            *tables.vectors,
            table.starts_M,
            table.ends_M,
            problem.scale,
            *q.stride()[:2],
            *k.stride()[:2],
            g.stride(0),
            beta.stride(0),
            H=H,
            GROUP=axes["GROUP"],
            K=axes["K"],
            C=CHUNK,
            L2NORM=problem.l2norm,
            EPS=L2_EPS,
            LEVELS=CHUNK.bit_length() - 1,
            LOW=tl.float16 if small else tl.float32,
            num_warps=4,
            num_stages=1,
        )
    return tables


def value_block(problem: Problem) -> int:
    """Choose B: as wide as leaves a program for every multiprocessor, between 16 (or V) and 64."""
    U, V = problem.v_TUV.shape[1:]
    block = min(V, 64)
    while block > 16 and len(problem.lengths) * U * (V // block) < multiprocessors(problem.v_TUV.device):
        block //= 2
    return block


def scan(
    problem: Problem,
    tables: Tables,
    initial_NUKV: torch.Tensor | None,
    *,
    output: torch.Tensor | None = None,
    final_NUKV: torch.Tensor | None = None,
    trace: Trace | None = None,
) -> None:
    """Run the state through every sequence, writing into what is given."""
    axes, block = problem.axes, value_block(problem)
    q, k, v = problem.q_THK, problem.k_THK, problem.v_TUV
    none = tables.decay_MUC
    scan_kernel[(len(problem.lengths) * v.shape[1] * (v.shape[2] // block),)](
        q,
        k,
        v,
        tables.inverse_MUCC,
        tables.scores_MUCC,
        *tables.vectors,
        none if output is None else output,
        none if trace is None else trace.states_MUKV,
        none if trace is None else trace.updates_MUCV,
        none if initial_NUKV is None else initial_NUKV,
        none if final_NUKV is None else final_NUKV,
        problem.lengths.on(q.device),
        problem.table.offsets_N1,
        problem.scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        **axes,
        B=block,
        HAS_INITIAL=initial_NUKV is not None,
        WRITE_FINAL=final_NUKV is not None,
        WRITE_OUTPUT=output is not None,
        WRITE_STATES=trace is not None,
        num_warps=4,
        num_stages=2,
    )


def scan_backward(
    problem: Problem,
    tables: Tables,
    do_TUV: torch.Tensor,
    dfinal_NUKV: torch.Tensor | None,
    dtrace: Trace,
    dinitial_NUKV: torch.Tensor | None,
) -> None:
    """Run the state's gradient back through every sequence."""
    axes, block = problem.axes, value_block(problem)
    q, k = problem.q_THK, problem.k_THK
    none = tables.decay_MUC
    scan_backward_kernel[(len(problem.lengths) * do_TUV.shape[1] * (axes["V"] // block),)](
        q,
        k,
        do_TUV,
        tables.inverse_MUCC,
        tables.scores_MUCC,
        *tables.vectors,
        dtrace.states_MUKV,
        dtrace.updates_MUCV,
        none if dinitial_NUKV is None else dinitial_NUKV,
        none if dfinal_NUKV is None else dfinal_NUKV,
        problem.lengths.on(q.device),
        problem.table.offsets_N1,
        problem.scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *do_TUV.stride()[:2],
        **axes,
        B=block,
        HAS_DFINAL=dfinal_NUKV is not None,
        WRITE_DINITIAL=dinitial_NUKV is not None,
        num_warps=4,
        num_stages=2,
    )


def gradients(
    problem: Problem, tables: Tables, do_TUV: torch.Tensor, trace: Trace, dtrace: Trace
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g and beta (the last two in float32)."""
    axes, table = problem.axes, problem.table
    q, k, v = problem.q_THK, problem.k_THK, problem.v_TUV
    results = (
        problem.empty(*q.shape),
        problem.empty(*k.shape),
        problem.empty(*v.shape),
        problem.empty(*v.shape[:2], dtype=torch.float32),
        problem.empty(*v.shape[:2], dtype=torch.float32),
    )
    if table.chunks:
        gradients_kernel[(table.chunks * axes["H"],)](
            q,
            k,
            v,
            do_TUV,
            trace.states_MUKV,
            trace.updates_MUCV,
            dtrace.states_MUKV,
            dtrace.updates_MUCV,
            *tables.vectors,
            *results,
            problem.empty(6, *tables.decay_MUC.shape, dtype=torch.float32),
            table.starts_M,
            table.ends_M,
            problem.scale,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *do_TUV.stride()[:2],
            **axes,
            B=min(axes["V"], 64),
            L2NORM=problem.l2norm,
            STAGES=1,
            num_warps=8,
            num_stages=1,
        )
    return results

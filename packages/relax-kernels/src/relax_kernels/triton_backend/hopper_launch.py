"""Launches of the gated delta rule's kernels for Hopper, and whether they serve a problem.

Axes as in `delta_scan`.
They use Triton's own lower level (gluon), whose interface may change between releases: another release than
the one they were tested with gets the kernels of `delta_launch`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from relax_kernels.triton_backend.delta_gradients import decay_kernel
from relax_kernels.triton_backend.delta_problem import CHUNK, Problem, Tables, Trace
from relax_kernels.triton_backend.hopper_gradients import gradients_kernel
from relax_kernels.triton_backend.hopper_scan import scan_kernel
from relax_kernels.triton_backend.hopper_scan_backward import scan_backward_kernel
from relax_kernels.triton_backend.launch import multiprocessors

TESTED_TRITON = ("3.6",)
DIMS = (64, 128)


def serves(problem: Problem) -> bool:
    """Tell whether these kernels serve a problem."""
    q, v = problem.q_THK, problem.v_TUV
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and ".".join(triton.__version__.split(".")[:2]) in TESTED_TRITON
        and q.dtype == torch.bfloat16
        and q.shape[2] == v.shape[2]
        and q.shape[2] in DIMS
        and problem.table.chunks > 0
    )


def _layout(columns: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16)


def tokens(x_THD: torch.Tensor, columns: int) -> Any:
    """Describe tiles of CHUNK tokens and some columns of [T, heads * D]; copied if the copy engine cannot
    read it.
    """
    T, heads, D = x_THD.shape
    aligned = x_THD.stride(0) % 8 == 0 and x_THD.data_ptr() % 16 == 0
    if x_THD.stride(2) != 1 or x_THD.stride(1) != D or not aligned:
        x_THD = x_THD.contiguous()
    return TensorDescriptor(x_THD, [T, heads * D], [x_THD.stride(0), 1], [CHUNK, columns], _layout(columns))


def tiles(x: torch.Tensor | None, rows: int, columns: int) -> Any:
    """Describe tiles of a dense tensor whose leading axes are merged."""
    assert x is not None, "a scan writes an output or a trace"
    width = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [rows, columns], _layout(columns))


def value_block(problem: Problem) -> dict[str, int]:
    """Choose B, the warps that go with it, and how many chunks are under way."""
    U, V = problem.v_TUV.shape[1:]
    wanted = 0.9 * multiprocessors(problem.v_TUV.device)
    block = V
    while block > 32 and len(problem.lengths) * U * (V // block) < wanted:
        block //= 2
    groups = 2 if block == 128 else 1
    return {"B": block, "WN": groups, "STAGES": 2 if block == 128 else 3, "num_warps": 4 * groups}


def scan(
    problem: Problem,
    tables: Tables,
    initial_NUKV: torch.Tensor | None,
    *,
    output: torch.Tensor | None = None,
    final_NUKV: torch.Tensor | None = None,
    trace: Trace | None = None,
) -> None:
    """Run the state through every sequence, writing into what is given: `output` or `trace`."""
    axes, plan = problem.axes, value_block(problem)
    block, v = plan["B"], problem.v_TUV
    keys, square = tokens(problem.k_THK, axes["K"]), tiles(tables.inverse_MUCC, CHUNK, CHUNK)
    values = tokens(v, block)
    none = tables.decay_MUC
    scan_kernel[(len(problem.lengths) * v.shape[1] * (axes["V"] // block),)](
        keys if output is None else tokens(problem.q_THK, axes["K"]),
        keys,
        values,
        square,
        tiles(tables.scores_MUCC, CHUNK, CHUNK),
        # Without a trace nothing goes through these; the layout is that of the state's tile all the same.
        tiles(output if trace is None else trace.states_MUKV, axes["K"], block),
        tiles(output if trace is None else trace.updates_MUCV, CHUNK, block),
        *tables.vectors,
        none if output is None else output,
        none if initial_NUKV is None else initial_NUKV,
        none if final_NUKV is None else final_NUKV,
        problem.lengths.on(v.device),
        problem.table.offsets_N1,
        problem.scale,
        **axes,
        **plan,
        HAS_INITIAL=initial_NUKV is not None,
        WRITE_FINAL=final_NUKV is not None,
        WRITE_OUTPUT=output is not None,
        WRITE_STATES=trace is not None,
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
    axes, plan = problem.axes, value_block(problem)
    block = plan["B"]
    none = tables.decay_MUC
    scan_backward_kernel[(len(problem.lengths) * do_TUV.shape[1] * (axes["V"] // block),)](
        tokens(problem.q_THK, axes["K"]),
        tokens(problem.k_THK, axes["K"]),
        tokens(do_TUV, block),
        tiles(tables.inverse_MUCC, CHUNK, CHUNK),
        tiles(tables.scores_MUCC, CHUNK, CHUNK),
        tiles(dtrace.states_MUKV, axes["K"], block),
        tiles(dtrace.updates_MUCV, CHUNK, block),
        *tables.vectors,
        none if dinitial_NUKV is None else dinitial_NUKV,
        none if dfinal_NUKV is None else dfinal_NUKV,
        problem.lengths.on(do_TUV.device),
        problem.table.offsets_N1,
        problem.scale,
        **axes,
        **plan,
        HAS_DFINAL=dfinal_NUKV is not None,
        WRITE_DINITIAL=dinitial_NUKV is not None,
    )


def gradients(
    problem: Problem, tables: Tables, do_TUV: torch.Tensor, trace: Trace, dtrace: Trace
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g and beta (the last two in float32)."""
    axes, table = problem.axes, problem.table
    q, k, v = problem.q_THK, problem.k_THK, problem.v_TUV
    H, U, K, V = axes["H"], v.shape[1], axes["K"], axes["V"]
    dq, dk, dv = problem.empty(*q.shape), problem.empty(*k.shape), problem.empty(*v.shape)
    dg, dbeta, sums, chunk_gains = (
        problem.empty(*shape, dtype=torch.float32)
        for shape in (v.shape[:2], v.shape[:2], (3, table.chunks, U, CHUNK), (table.chunks, U))
    )
    gradients_kernel[(min(table.chunks * H, multiprocessors(q.device)),)](
        tokens(q, K),
        tokens(k, K),
        tokens(v, V),
        tokens(do_TUV, V),
        tiles(trace.states_MUKV, K, V),
        tiles(trace.updates_MUCV, CHUNK, V),
        tiles(dtrace.states_MUKV, K, V),
        tiles(dtrace.updates_MUCV, CHUNK, V),
        *tables.vectors,
        dq,
        dk,
        dv,
        sums,
        dbeta,
        chunk_gains,
        table.starts_M,
        table.ends_M,
        table.chunks,
        problem.scale,
        **axes,
        L2NORM=problem.l2norm,
        num_warps=8,
    )
    decay_kernel[(table.chunks * U,)](
        sums, chunk_gains, dg, table.starts_M, table.ends_M, U=U, C=CHUNK, num_warps=1
    )
    return dq, dk, dv, dg, dbeta

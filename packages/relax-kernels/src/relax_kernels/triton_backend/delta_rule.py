"""Gated delta rule on CUDA: the launches of the four kernels and their place in autograd.

Axes as in `delta_scan`. The forward pass keeps its inputs only; the backward pass makes the tables and states
again (for T tokens: M * U * (K * V + C * V + 2 C * C) values of the input dtype twice over, freed when it
returns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.triton_backend.delta_gradients import gradients_kernel
from relax_kernels.triton_backend.delta_prepare import prepare_kernel
from relax_kernels.triton_backend.delta_scan import scan_kernel
from relax_kernels.triton_backend.delta_scan_backward import scan_backward_kernel
from relax_kernels.triton_backend.jit import apply
from relax_kernels.triton_backend.launch import dense_rows, multiprocessors, on_device_of

CHUNK = 64
L2_EPS = 1e-6
# Three merges of 16-bit results: tf32 keeps 11 bits of each factor, the tables are rounded to 8 or 11
# afterwards.
INVERSE_PRECISION = "tf32"


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of CHUNK tokens in the order of the packed axis; the last of a sequence may be short."""

    chunks: int
    starts_M: torch.Tensor
    """First token of each chunk, int32."""
    ends_M: torch.Tensor
    """One past its last token, int32."""
    offsets_N1: torch.Tensor
    """First chunk of each sequence, and M, int32."""

    @classmethod
    def of(cls, lengths: CuSeqlens, device: torch.device) -> ChunkTable:
        """Return the table of these lengths; made once and kept with them."""
        return lengths.table(("triton_chunks", device), lambda: cls._build(lengths, device))

    @classmethod
    def _build(cls, lengths: CuSeqlens, device: torch.device) -> ChunkTable:
        length_N = np.asarray(lengths.lengths, dtype=np.int64)
        begin_N = np.asarray(lengths.host[:-1], dtype=np.int64)
        count_N = -(-length_N // CHUNK)
        offsets_N1 = np.concatenate(([0], np.cumsum(count_N)))
        chunks = int(offsets_N1[-1])
        place_M = np.arange(chunks) - np.repeat(offsets_N1[:-1], count_N)
        starts_M = np.repeat(begin_N, count_N) + place_M * CHUNK
        ends_M = np.minimum(starts_M + CHUNK, np.repeat(begin_N + length_N, count_N))
        tables = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (starts_M, ends_M, offsets_N1))
        return cls(chunks, *tables)


@dataclass(frozen=True)
class Tables:
    """What `prepare_kernel` writes."""

    inverse_MUCC: torch.Tensor
    scores_MUCC: torch.Tensor
    decay_MUC: torch.Tensor
    step_MUC: torch.Tensor
    q_factor_MHC: torch.Tensor
    k_factor_MHC: torch.Tensor

    def all(self) -> tuple[torch.Tensor, ...]:
        """Return them in the order in which the scans take them."""
        return (
            self.inverse_MUCC,
            self.scores_MUCC,
            self.decay_MUC,
            self.step_MUC,
            self.q_factor_MHC,
            self.k_factor_MHC,
        )


@dataclass(frozen=True)
class Problem:
    """One call: its inputs with dense rows, and what is derived from their shapes."""

    inputs: tuple[torch.Tensor, ...]
    """q_THK, k_THK, v_TUV, g_TU, beta_TU."""
    lengths: CuSeqlens
    l2norm: bool
    scale: float

    @property
    def q_THK(self) -> torch.Tensor:
        """Return the queries."""
        return self.inputs[0]

    @property
    def k_THK(self) -> torch.Tensor:
        """Return the keys."""
        return self.inputs[1]

    @property
    def v_TUV(self) -> torch.Tensor:
        """Return the values."""
        return self.inputs[2]

    @property
    def table(self) -> ChunkTable:
        """Return where the chunks lie."""
        return ChunkTable.of(self.lengths, self.q_THK.device)

    @property
    def axes(self) -> dict[str, int]:
        """Return the sizes every kernel is compiled for."""
        _, H, K = self.q_THK.shape
        _, U, V = self.v_TUV.shape
        return {"H": H, "GROUP": U // H, "K": K, "V": V, "C": CHUNK}

    def value_block(self) -> int:
        """Choose B: as wide as leaves a program for every multiprocessor, between 16 (or V) and 64."""
        U, V = self.v_TUV.shape[1:]
        block = min(V, 64)
        while block > 16 and len(self.lengths) * U * (V // block) < multiprocessors(self.v_TUV.device):
            block //= 2
        return block

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return new memory on the inputs' device, of the inputs' dtype unless another is named."""
        return torch.empty(shape, dtype=dtype or self.q_THK.dtype, device=self.q_THK.device)


def prepare(problem: Problem) -> Tables:
    """Run `prepare_kernel`."""
    axes, table = problem.axes, problem.table
    H, U, M = axes["H"], axes["H"] * axes["GROUP"], table.chunks
    q, k, _, g, beta = problem.inputs
    tables = Tables(
        problem.empty(M, U, CHUNK, CHUNK),
        problem.empty(M, U, CHUNK, CHUNK),
        problem.empty(M, U, CHUNK, dtype=torch.float32),
        problem.empty(M, U, CHUNK, dtype=torch.float32),
        problem.empty(M, H, CHUNK, dtype=torch.float32),
        problem.empty(M, H, CHUNK, dtype=torch.float32),
    )
    if M:
        prepare_kernel[(M * H,)](
            q,
            k,
            g,
            beta,
            *tables.all(),
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
            PRECISION=INVERSE_PRECISION,
            num_warps=4,
            num_stages=1,
        )
    return tables


def scan(
    problem: Problem,
    tables: Tables,
    initial_NUKV: torch.Tensor | None,
    *,
    output: torch.Tensor | None = None,
    final_NUKV: torch.Tensor | None = None,
    states_MUKV: torch.Tensor | None = None,
    updates_MUCV: torch.Tensor | None = None,
) -> None:
    """Run `scan_kernel`, writing into what is given (states and updates together or not at all)."""
    axes, block = problem.axes, problem.value_block()
    q, k, v = problem.q_THK, problem.k_THK, problem.v_TUV
    none = tables.decay_MUC
    grid = (len(problem.lengths) * v.shape[1] * (v.shape[2] // block),)
    scan_kernel[grid](
        q,
        k,
        v,
        *tables.all(),
        none if output is None else output,
        none if states_MUKV is None else states_MUKV,
        none if updates_MUCV is None else updates_MUCV,
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
        WRITE_STATES=states_MUKV is not None,
        num_warps=4,
        num_stages=2,
    )


def scan_backward(
    problem: Problem,
    tables: Tables,
    do_TUV: torch.Tensor,
    dfinal_NUKV: torch.Tensor | None,
    dstates_MUKV: torch.Tensor,
    dupdates_MUCV: torch.Tensor,
    dinitial_NUKV: torch.Tensor | None,
) -> None:
    """Run `scan_backward_kernel`."""
    axes, block = problem.axes, problem.value_block()
    q, k = problem.q_THK, problem.k_THK
    none = tables.decay_MUC
    scan_backward_kernel[(len(problem.lengths) * do_TUV.shape[1] * (axes["V"] // block),)](
        q,
        k,
        do_TUV,
        *tables.all(),
        dstates_MUKV,
        dupdates_MUCV,
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
    problem: Problem,
    tables: Tables,
    do_TUV: torch.Tensor,
    states_MUKV: torch.Tensor,
    updates_MUCV: torch.Tensor,
    dstates_MUKV: torch.Tensor,
    dupdates_MUCV: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Run `gradients_kernel`; return the gradients of q, k, v, g and beta (the last two in float32)."""
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
            states_MUKV,
            updates_MUCV,
            dstates_MUKV,
            dupdates_MUCV,
            *tables.all()[2:],
            *results,
            problem.empty(4, *tables.decay_MUC.shape, dtype=torch.float32),
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
            num_warps=4,
            num_stages=1,
        )
    return results


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
            scan(problem, prepare(problem), initial, output=o_TUV, final_NUKV=final)
        ctx.save_for_backward(*inputs, initial)
        ctx.options = (lengths, l2norm, scale)
        ctx.set_materialize_grads(False)
        return o_TUV, final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do_TUV: torch.Tensor | None, dfinal_NUKV: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, initial = ctx.saved_tensors
        problem = Problem(tuple(inputs), *ctx.options)
        q, _, v = inputs[:3]
        (_, U, V), K, M = v.shape, q.shape[2], problem.table.chunks
        do = torch.zeros_like(v) if do_TUV is None else dense_rows(do_TUV.to(v.dtype))
        dfinal = None if dfinal_NUKV is None else dfinal_NUKV.contiguous()
        dinitial = None
        if initial is not None:
            dinitial = problem.empty(*initial.shape, dtype=torch.float32)
        with on_device_of(q):
            tables = prepare(problem)
            states, dstates = problem.empty(M, U, K, V), problem.empty(M, U, K, V)
            updates, dupdates = problem.empty(M, U, CHUNK, V), problem.empty(M, U, CHUNK, V)
            scan(problem, tables, initial, states_MUKV=states, updates_MUCV=updates)
            scan_backward(problem, tables, do, dfinal, dstates, dupdates, dinitial)
            dq, dk, dv, dg, dbeta = gradients(problem, tables, do, states, updates, dstates, dupdates)
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

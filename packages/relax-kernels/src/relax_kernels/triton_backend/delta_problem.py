"""One call of the gated delta rule: its inputs, its chunks, and the tables made from them.

Axes as in `delta_scan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.upload import upload

CHUNK = 64


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
        tables = (
            upload(torch.from_numpy(x.astype(np.int32)), device) for x in (starts_M, ends_M, offsets_N1)
        )
        return cls(chunks, *tables)


@dataclass(frozen=True)
class Tables:
    """What `delta_prepare` writes."""

    inverse_MUCC: torch.Tensor
    scores_MUCC: torch.Tensor
    decay_MUC: torch.Tensor
    rest_MUC: torch.Tensor
    step_MUC: torch.Tensor
    q_factor_MHC: torch.Tensor
    k_factor_MHC: torch.Tensor

    @property
    def vectors(self) -> tuple[torch.Tensor, ...]:
        """Return the numbers per token, in the order in which every kernel takes them."""
        return self.decay_MUC, self.rest_MUC, self.step_MUC, self.q_factor_MHC, self.k_factor_MHC


@dataclass(frozen=True)
class Problem:
    """Inputs with dense rows, and what is derived from their shapes."""

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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return new memory on the inputs' device, of the inputs' dtype unless another is named."""
        return torch.empty(shape, dtype=dtype or self.q_THK.dtype, device=self.q_THK.device)


@dataclass(frozen=True)
class Trace:
    """What a scan leaves behind for each chunk: S before it and X; or, of the backward scan, dS' and dU."""

    states_MUKV: torch.Tensor
    updates_MUCV: torch.Tensor

    @classmethod
    def empty(cls, problem: Problem) -> Trace:
        """Return new memory for a problem."""
        (U, V), K, M = problem.v_TUV.shape[1:], problem.q_THK.shape[2], problem.table.chunks
        return cls(problem.empty(M, U, K, V), problem.empty(M, U, CHUNK, V))

"""Packed tokens laid out as grids of chunks, so that a recurrence over chunks serves many sequences at once.

T tokens, N sequences of a grid, M chunks of C tokens, H heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relax_kernels.cu_seqlens import CuSeqlens

ONE_CHUNK = 32
"""Sequences up to this long are one chunk each, so that no state is ever needed between chunks."""
LONG_CHUNK = 32
"""Tokens per chunk of longer sequences."""


@dataclass(frozen=True)
class ChunkGrid:
    """Some of the sequences in chunks, ordered by step: first chunks, then the second chunks of those that go
    on.

    Sequences are ranked by their number of chunks, most first, so that step i is the slice
    [starts[i], starts[i] + counts[i]) of the chunks and belongs to the first counts[i] ranks.
    """

    chunk: int
    """C, tokens in a chunk."""
    chunks: int
    """M, chunks in all."""
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sequence_N: torch.Tensor
    """Sequence of each rank, int64."""
    token_T: torch.Tensor
    """Tokens of the grid's sequences, int64 rows of the packed axis."""
    cell_T: torch.Tensor
    """Cell (of M * C) of each of them, int64."""
    token_MC: torch.Tensor
    """Token of each cell, int64; of an empty cell any token."""
    empty: torch.Tensor | None
    """Empty cells, int64; None if there are none."""
    is_packed_order: bool
    """Whether the cells are exactly the packed tokens in order, so that nothing need move."""

    def spread(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return [M, H, C, ...] from [T, H, ...]; empty cells are 0."""
        if self.is_packed_order:
            x_MCH = x_TH
        else:
            x_MCH = x_TH.index_select(0, self.token_MC)
            if self.empty is not None:
                x_MCH.index_fill_(0, self.empty, 0.0)
        return x_MCH.reshape(self.chunks, self.chunk, *x_TH.shape[1:]).transpose(1, 2).contiguous()

    def collect(self, x_MHC: torch.Tensor, into_TH: torch.Tensor) -> None:
        """Write [M, H, C, ...] to the grid's tokens of [T, H, ...]."""
        x_MCH = x_MHC.transpose(1, 2)
        if self.is_packed_order:
            into_TH.view(x_MCH.shape).copy_(x_MCH)
        else:
            cells = x_MCH.reshape(self.chunks * self.chunk, *into_TH.shape[1:])
            into_TH.index_copy_(0, self.token_T, cells.index_select(0, self.cell_T).to(into_TH.dtype))


def grids_of(lengths: CuSeqlens, max_cells: int, device: torch.device) -> tuple[ChunkGrid, ...]:
    """Cut the sequences into grids of like lengths and of about max_cells tokens at most; made once.

    Like lengths keep a grid full; the bound keeps its tensors in cache. Empty sequences are in no grid, and a
    sequence is never cut.
    """
    return lengths.table(
        ("chunk_grids", max_cells, device), lambda: tuple(_build_all(lengths, max_cells, device))
    )


def _build_all(lengths: CuSeqlens, max_cells: int, device: torch.device) -> list[ChunkGrid]:
    alike: dict[int, list[int]] = defaultdict(list)
    for sequence, length in enumerate(lengths.lengths):
        if length:
            alike[_size_class(length)].append(sequence)
    grids = []
    for members in alike.values():
        part: list[int] = []
        for sequence in members:
            if part and sum(lengths.lengths[s] for s in part) + lengths.lengths[sequence] > max_cells:
                grids.append(_build(lengths, part, device))
                part = []
            part.append(sequence)
        grids.append(_build(lengths, part, device))
    return grids


def _size_class(length: int) -> int:
    """Sequences of one chunk by their length in steps of 8; all longer ones together."""
    return -(-length // 8) if length <= ONE_CHUNK else ONE_CHUNK


def _chunk_length(longest: int) -> int:
    return -(-longest // 4) * 4 if longest <= ONE_CHUNK else LONG_CHUNK


def _build(lengths: CuSeqlens, members: Sequence[int], device: torch.device) -> ChunkGrid:
    sequence_N = np.asarray(members, dtype=np.int64)
    length_N = np.asarray(lengths.lengths, dtype=np.int64)[sequence_N]
    first_N = np.asarray(lengths.host, dtype=np.int64)[sequence_N]
    C = _chunk_length(int(length_N.max()))
    chunks_N = -(-length_N // C)
    order_N = np.argsort(-chunks_N, kind="stable")
    rank_N = np.empty_like(order_N)
    rank_N[order_N] = np.arange(len(order_N))
    count_S = np.array([(chunks_N > step).sum() for step in range(int(chunks_N.max()))], dtype=np.int64)
    start_S = np.cumsum(count_S) - count_S
    M = int(count_S.sum())

    place_T = np.arange(length_N.sum()) - np.repeat(np.cumsum(length_N) - length_N, length_N)
    token_T = np.repeat(first_N, length_N) + place_T
    cell_T = (start_S[place_T // C] + np.repeat(rank_N, length_N)) * C + place_T % C
    token_MC = np.full(M * C, token_T[0])
    token_MC[cell_T] = token_T
    empty = np.setdiff1d(np.arange(M * C), cell_T)

    def on_device(values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return ChunkGrid(
        chunk=C,
        chunks=M,
        starts=tuple(map(int, start_S)),
        counts=tuple(map(int, count_S)),
        sequence_N=on_device(sequence_N[order_N]),
        token_T=on_device(token_T),
        cell_T=on_device(cell_T),
        token_MC=on_device(token_MC),
        empty=on_device(empty) if len(empty) else None,
        is_packed_order=np.array_equal(token_MC, np.arange(lengths.total)),
    )

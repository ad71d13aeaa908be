"""Packed tokens laid out as a grid of chunks, so that a recurrence over chunks serves all sequences at once.

T tokens, N sequences, M chunks of C tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from relax_kernels.cu_seqlens import CuSeqlens


@dataclass(frozen=True)
class ChunkGrid:
    """Chunks ordered by step: the first chunk of every sequence, then the second of those that have one, and so on.

    Sequences are ranked by their number of chunks, most first, so that step i is the slice
    [starts[i], starts[i] + counts[i]) of the chunks and belongs to the first counts[i] ranks.
    """

    chunk: int
    """C, tokens in a chunk."""
    chunks: int
    """M, chunks in all."""
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slot_T: torch.Tensor | None
    """Cell (of M * C) of each token, int64; None if token t lies in cell t and no cell is empty."""
    rank_order_N: torch.Tensor
    """Sequence of each rank, int64."""

    @classmethod
    def of(cls, lengths: CuSeqlens, chunk: int, device: torch.device) -> ChunkGrid:
        """Return the grid of these lengths; made once and kept with them."""
        return lengths.table(("chunk_grid", chunk, device), lambda: cls._build(lengths, chunk, device))

    @classmethod
    def _build(cls, lengths: CuSeqlens, chunk: int, device: torch.device) -> ChunkGrid:
        length_N = np.asarray(lengths.lengths, dtype=np.int64)
        chunks_N = -(-length_N // chunk)
        order_N = np.argsort(-chunks_N, kind="stable")
        rank_N = np.empty_like(order_N)
        rank_N[order_N] = np.arange(len(order_N))
        steps = int(chunks_N.max(initial=0))
        count_S = np.array([(chunks_N > step).sum() for step in range(steps)], dtype=np.int64)
        start_S = np.concatenate(([0], np.cumsum(count_S)))[:-1]
        position_T = np.arange(lengths.total) - np.repeat(np.asarray(lengths.host[:-1]), length_N)
        cell_T = start_S[position_T // chunk] + np.repeat(rank_N, length_N) if steps else position_T
        slot_T = cell_T * chunk + position_T % chunk
        chunks = int(count_S.sum())
        in_place = chunks * chunk == lengths.total and bool((slot_T == np.arange(lengths.total)).all())
        return cls(
            chunk=chunk,
            chunks=chunks,
            starts=tuple(map(int, start_S)),
            counts=tuple(map(int, count_S)),
            slot_T=None if in_place else torch.from_numpy(slot_T).to(device),
            rank_order_N=torch.from_numpy(order_N).to(device),
        )

    def spread(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return [M, C, ...] from [T, ...], empty cells 0."""
        cells = (self.chunks * self.chunk, *x_T.shape[1:])
        if self.slot_T is not None:
            x_T = x_T.new_zeros(cells).index_copy_(0, self.slot_T, x_T)
        return x_T.reshape(self.chunks, self.chunk, *x_T.shape[1:])

    def collect(self, x_MC: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] from [M, C, ...]; the transpose of `spread`."""
        x = x_MC.reshape(self.chunks * self.chunk, *x_MC.shape[2:])
        return x if self.slot_T is None else x.index_select(0, self.slot_T)

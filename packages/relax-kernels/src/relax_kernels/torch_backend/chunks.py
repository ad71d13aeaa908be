"""Packed tokens laid out as grids of chunks, so that a recurrence over chunks serves many sequences at once.

T tokens, N sequences of a grid, M chunks of C tokens, H heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.upload import upload

ONE_CHUNK = 32
"""Sequences up to this long are one chunk each, so that no state is ever needed between chunks."""
LONG_CHUNK = 32
"""Tokens per chunk of longer sequences."""


@dataclass(frozen=True)
class ChunkGrid:
    """Some of the sequences in chunks, by step: all first chunks, then second chunks, and so on.

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
    cells: slice
    """Its M * C cells among those of all grids."""


@dataclass(frozen=True)
class ChunkLayout:
    """All sequences, cut into grids of like lengths; empty sequences are in none."""

    grids: tuple[ChunkGrid, ...]
    token_of_cell: torch.Tensor
    """Row of the packed axis, int64; of an empty cell any token of its grid."""
    empty: torch.Tensor | None
    """Empty cells, int64; None if there are none."""
    cell_of_token: torch.Tensor
    in_order: bool
    """Whether the cells are exactly the packed tokens in order, so that nothing need move."""

    @classmethod
    def of(cls, lengths: CuSeqlens, max_cells: int, device: torch.device) -> ChunkLayout:
        """Return the layout with grids of at most about max_cells tokens; made once and kept.

        The bound keeps a grid's tensors in cache. A sequence is never cut.
        """
        return lengths.table(("chunk_layout", max_cells, device), lambda: _build(lengths, max_cells, device))

    def spread(self, x_TH: torch.Tensor) -> list[torch.Tensor]:
        """Return [M, H, C, ...] of each grid from [T, H, ...]; empty cells are 0."""
        if not self.in_order:
            x_TH = x_TH.index_select(0, self.token_of_cell)
            if self.empty is not None:
                # Filling at an index makes the host wait for a device; copying does not.
                x_TH.index_copy_(0, self.empty, x_TH.new_zeros(len(self.empty), *x_TH.shape[1:]))
        rest = x_TH.shape[1:]
        return [
            x_TH[grid.cells].reshape(grid.chunks, grid.chunk, *rest).transpose(1, 2).contiguous()
            for grid in self.grids
        ]

    def collect(self, parts: Sequence[torch.Tensor], rest: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return [T, H, ...] from [M, H, C, ...] of each grid; `rest` is the shape without T."""
        device = self.token_of_cell.device
        cells = torch.empty(len(self.token_of_cell), *rest, dtype=dtype, device=device)
        for grid, part_MHC in zip(self.grids, parts, strict=True):
            cells[grid.cells].view(grid.chunks, grid.chunk, *rest).copy_(part_MHC.transpose(1, 2))
        return cells if self.in_order else cells.index_select(0, self.cell_of_token)


def _build(lengths: CuSeqlens, max_cells: int, device: torch.device) -> ChunkLayout:
    grids, tokens, cells = [], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    first_cell = 0
    for members in _alike(lengths, max_cells):
        grid, token_T, cell_T = _build_grid(lengths, members, first_cell, device)
        grids.append(grid)
        tokens.append(token_T)
        cells.append(cell_T)
        first_cell = grid.cells.stop
    token_T, cell_T = np.concatenate(tokens), np.concatenate(cells)
    token_of_cell = np.full(first_cell, 0)
    token_of_cell[cell_T] = token_T
    cell_of_token = np.empty_like(cell_T)
    cell_of_token[token_T] = cell_T
    empty = np.setdiff1d(np.arange(first_cell), cell_T)

    def on_device(values: npt.NDArray[np.int64]) -> torch.Tensor:
        return upload(torch.from_numpy(values), device)

    return ChunkLayout(
        grids=tuple(grids),
        token_of_cell=on_device(token_of_cell),
        empty=on_device(empty) if len(empty) else None,
        cell_of_token=on_device(cell_of_token),
        in_order=np.array_equal(token_of_cell, np.arange(lengths.total)),
    )


def _alike(lengths: CuSeqlens, max_cells: int) -> Iterator[list[int]]:
    """Sequences of like lengths, at most max_cells tokens together."""
    classes: dict[int, list[int]] = defaultdict(list)
    for sequence, length in enumerate(lengths.lengths):
        if length:
            classes[_size_class(length)].append(sequence)
    for members in classes.values():
        part: list[int] = []
        tokens = 0
        for sequence in members:
            if part and tokens + lengths.lengths[sequence] > max_cells:
                yield part
                part, tokens = [], 0
            part.append(sequence)
            tokens += lengths.lengths[sequence]
        yield part


def _size_class(length: int) -> int:
    """Sequences of one chunk by their length in steps of 8; all longer ones together."""
    return -(-length // 8) if length <= ONE_CHUNK else ONE_CHUNK


def _chunk_length(longest: int) -> int:
    return -(-longest // 4) * 4 if longest <= ONE_CHUNK else LONG_CHUNK


def _build_grid(
    lengths: CuSeqlens, members: Sequence[int], first_cell: int, device: torch.device
) -> tuple[ChunkGrid, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a grid, its tokens, and the cell of each of them."""
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
    chunk_T = start_S[place_T // C] + np.repeat(rank_N, length_N)
    grid = ChunkGrid(
        chunk=C,
        chunks=M,
        starts=tuple(map(int, start_S)),
        counts=tuple(map(int, count_S)),
        sequence_N=upload(torch.from_numpy(sequence_N[order_N]), device),
        cells=slice(first_cell, first_cell + M * C),
    )
    return grid, token_T, first_cell + chunk_T * C + place_T % C

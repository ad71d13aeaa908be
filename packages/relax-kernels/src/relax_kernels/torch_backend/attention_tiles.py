"""Packed attention cut into tiles: sequences of like length, and blocks of queries where those are long.

T query tokens, S key tokens, B sequences of a tile, I queries and J keys of a tile (padded to its longest
sequence).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.upload import upload

TILE_SCORES = 2**18
"""Scores of one tile, about: 1 MiB in float32 stays in cache."""
FEWEST_QUERIES, MOST_QUERIES = 16, 64
"""Queries of one sequence in a tile, unless it has fewer: few enough that causal tiles end early."""


@dataclass(frozen=True)
class Rows:
    """Rows of B sequences side by side, padded to L places each."""

    run: slice | None
    """The rows, if they are those of one sequence and need no table."""
    row_BL: torch.Tensor | None
    """Else the row of each place; places past the end of a sequence repeat its last row."""
    filled: torch.Tensor | None
    """Places (of B * L) that hold a row; None if all do."""

    @classmethod
    def of(cls, row_BL: npt.NDArray[np.int64], empty_BL: npt.NDArray[np.bool_], device: torch.device) -> Rows:
        """Return the rows of a table whose last places may be empty."""
        if len(row_BL) == 1:
            return cls(slice(int(row_BL[0, 0]), int(row_BL[0, -1]) + 1), None, None)
        filled = upload(torch.from_numpy(np.flatnonzero(~empty_BL)), device) if empty_BL.any() else None
        return cls(None, upload(torch.from_numpy(row_BL), device), filled)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, L, ...]."""
        if self.row_BL is None:
            return x[self.run].unsqueeze(0)
        return x.index_select(0, self.row_BL.view(-1)).view(*self.row_BL.shape, *x.shape[1:])

    def put(self, into: torch.Tensor, x_BL: torch.Tensor) -> None:
        """Write the places that hold a row."""
        if self.row_BL is None:
            into[self.run] = x_BL[0]
        else:
            into.index_copy_(0, *self._held(x_BL))

    def add(self, into: torch.Tensor, x_BL: torch.Tensor) -> None:
        """Add the places that hold a row."""
        if self.row_BL is None:
            into[self.run] += x_BL[0]
        else:
            into.index_add_(0, *self._held(x_BL))

    def _held(self, x_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.row_BL is not None
        row, x = self.row_BL.view(-1), x_BL.flatten(0, 1)
        if self.filled is None:
            return row, x
        return row.index_select(0, self.filled), x.index_select(0, self.filled)


@dataclass(frozen=True)
class Tile:
    """Some queries of some sequences, and the keys they may see."""

    queries: Rows
    keys: Rows
    seen: int
    """J."""
    seen_by_all: int
    """Every query sees the keys before this place."""
    limit_BI1: torch.Tensor
    """A query sees the keys before this place; a blind one is given the first, to keep its scores finite."""
    empty_BI: torch.Tensor | None
    """Places that hold no query; None if all do."""
    blind_row: torch.Tensor | None
    """Rows of queries that see no key; None if there are none."""

    def mask_B11IJ(self) -> torch.Tensor | None:
        """Which scores from the place seen_by_all on do not count, or None if all do."""
        if self.seen_by_all == self.seen:
            return None
        place_J = torch.arange(self.seen_by_all, self.seen, device=self.limit_BI1.device)
        return (place_J >= self.limit_BI1)[:, None, None]


def tiles_of(
    queries: CuSeqlens, keys: CuSeqlens, heads: int, causal: bool, device: torch.device
) -> tuple[Tile, ...]:
    """Return the tiles of a batch; made once and kept with the lengths of the queries.

    Sequences without queries or keys are in no tile.
    """
    key = ("attention_tiles", keys.host, heads, causal, device)
    return queries.table(key, lambda: tuple(_build(queries, keys, heads, causal, device)))


def _build(
    queries: CuSeqlens, keys: CuSeqlens, heads: int, causal: bool, device: torch.device
) -> Iterator[Tile]:
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence, (n, m) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if n and m:
            alike[_size_class(n), _size_class(m)].append(sequence)
    for members in alike.values():
        longest_q = max(queries.lengths[sequence] for sequence in members)
        longest_k = max(keys.lengths[sequence] for sequence in members)
        span = min(longest_q, max(FEWEST_QUERIES, min(MOST_QUERIES, TILE_SCORES // (heads * longest_k))))
        at_once = max(1, TILE_SCORES // (heads * span * longest_k))
        for first in range(0, len(members), at_once):
            part = members[first : first + at_once]
            for begin in range(0, max(queries.lengths[sequence] for sequence in part), span):
                yield _tile(queries, keys, part, begin, span, causal, device)


def _size_class(length: int) -> int:
    return max(length - 1, 15).bit_length()


def _tile(
    queries: CuSeqlens,
    keys: CuSeqlens,
    members: list[int],
    begin: int,
    span: int,
    causal: bool,
    device: torch.device,
) -> Tile:
    start_q, start_k = np.asarray(queries.host)[members][:, None], np.asarray(keys.host)[members][:, None]
    n_B1, m_B1 = np.asarray(queries.lengths)[members][:, None], np.asarray(keys.lengths)[members][:, None]
    place_BI = begin + np.arange(min(span, int(n_B1.max()) - begin)) + np.zeros_like(n_B1)
    limit_BI = m_B1 + np.minimum(place_BI + 1 - n_B1, 0) if causal else m_B1 + np.zeros_like(place_BI)
    seen = max(int(limit_BI.max()), 1)
    place_BJ = np.arange(seen) + np.zeros_like(m_B1)
    query_BI = start_q + np.minimum(place_BI, n_B1 - 1)
    key_BJ = start_k + np.minimum(place_BJ, m_B1 - 1)
    empty_BI = place_BI >= n_B1
    blind = query_BI[(limit_BI <= 0) & ~empty_BI]
    limit_BI = np.maximum(limit_BI, 1)

    def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
        return upload(torch.from_numpy(values), device)

    return Tile(
        queries=Rows.of(query_BI, empty_BI, device),
        keys=Rows.of(key_BJ, place_BJ >= m_B1, device),
        seen=seen,
        seen_by_all=min(int(limit_BI.min()), seen),
        limit_BI1=on_device(limit_BI[..., None]),
        empty_BI=on_device(empty_BI) if empty_BI.any() else None,
        blind_row=on_device(blind) if len(blind) else None,
    )

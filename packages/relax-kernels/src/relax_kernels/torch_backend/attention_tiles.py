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

TILE_SCORES = 2**18
"""Scores of one tile, about: 1 MiB in float32 stays in cache."""
FEWEST_QUERIES, MOST_QUERIES = 16, 64
"""Queries of one sequence in a tile, unless it has fewer: few enough that causal tiles end early."""


@dataclass(frozen=True)
class Tile:
    """Some queries of some sequences, and the keys they may see."""

    query_BI: torch.Tensor
    """Row of each query in the packed axis; places past the end of a sequence repeat its last row."""
    key_BJ: torch.Tensor
    """Row of each key, likewise."""
    query_place: torch.Tensor
    """Places (of B * I) that hold a query; query_row gives its row."""
    query_row: torch.Tensor
    empty_BI: torch.Tensor | None
    """Places that hold none; None if all do."""
    key_place: torch.Tensor
    key_row: torch.Tensor
    seen_by_all: int
    """Every query sees the keys before this place."""
    limit_BI1: torch.Tensor
    """A query sees the keys before this place; a blind one is given the first, to keep its scores finite."""
    blind_row: torch.Tensor | None
    """Rows of queries that see no key; None if there are none."""

    def mask_B11IJ(self) -> torch.Tensor | None:
        """Which scores from the place seen_by_all on do not count, or None if all do."""
        keys = self.key_BJ.shape[1]
        if self.seen_by_all == keys:
            return None
        place_J = torch.arange(self.seen_by_all, keys, device=self.key_BJ.device)
        return (place_J >= self.limit_BI1)[:, None, None]


def tiles_of(
    queries: CuSeqlens, keys: CuSeqlens, heads: int, causal: bool, device: torch.device
) -> tuple[Tile, ...]:
    """Return the tiles of a batch; made once and kept with the lengths of the queries.

    Sequences without queries or keys are in no tile.
    """
    key = ("attention_tiles", keys, heads, causal, device)
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
    real_q, real_k = np.flatnonzero(~empty_BI), np.flatnonzero(place_BJ < m_B1)
    blind = query_BI[(limit_BI <= 0) & ~empty_BI]
    limit_BI = np.maximum(limit_BI, 1)

    def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Tile(
        query_BI=on_device(query_BI),
        key_BJ=on_device(key_BJ),
        query_place=on_device(real_q),
        query_row=on_device(query_BI.reshape(-1)[real_q]),
        empty_BI=on_device(empty_BI) if empty_BI.any() else None,
        key_place=on_device(real_k),
        key_row=on_device(key_BJ.reshape(-1)[real_k]),
        limit_BI1=on_device(limit_BI[..., None]),
        seen_by_all=min(int(limit_BI.min()), seen),
        blind_row=on_device(blind) if len(blind) else None,
    )

"""Packed attention cut into tiles: sequences of like length, and blocks of queries where those are long.

T query tokens, S key tokens, B sequences of a tile, I queries and J keys of a tile (padded to its longest
sequence).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relax_kernels.cu_seqlens import CuSeqlens

TILE_SCORES = 2**20
"""Scores of one tile, about; bounds the memory and keeps a tile in cache."""


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
    key_place: torch.Tensor
    key_row: torch.Tensor
    limit_BI1: torch.Tensor
    """A query sees the keys whose place in the sequence is below this."""
    everything: bool
    """Whether every query sees every key of the tile, so that no mask is needed."""

    def mask_B11IJ(self) -> torch.Tensor | None:
        """Which scores do not count, or None if all do."""
        if self.everything:
            return None
        place_J = torch.arange(self.key_BJ.shape[1], device=self.key_BJ.device)
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
        at_once = max(1, TILE_SCORES // (heads * longest_q * longest_k))
        span = longest_q if at_once > 1 else max(1, min(longest_q, TILE_SCORES // (heads * longest_k)))
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
    real_q, real_k = np.flatnonzero(place_BI < n_B1), np.flatnonzero(place_BJ < m_B1)

    def on_device(values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Tile(
        query_BI=on_device(query_BI),
        key_BJ=on_device(key_BJ),
        query_place=on_device(real_q),
        query_row=on_device(query_BI.reshape(-1)[real_q]),
        key_place=on_device(real_k),
        key_row=on_device(key_BJ.reshape(-1)[real_k]),
        limit_BI1=on_device(limit_BI[..., None]),
        everything=bool((limit_BI >= seen).all()),
    )

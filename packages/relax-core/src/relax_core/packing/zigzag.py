"""The two orders in which context-parallel ranks share a packed row, and pieces cut from the row.

A row of T positions has 2 R equal chunks. In the zigzag order rank r holds chunks r and 2 R - 1 - r, so that
every rank has as many (query, key) pairs of a causal attention as any other. In the contiguous order rank r
holds chunks 2 r and 2 r + 1, so that a recurrence runs through the ranks in turn. Samples begin and end
anywhere.

Axes: T positions of the row; R ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from relax_kernels import CuSeqlens
from torch import Tensor


def zigzag_chunks(size: int, rank: int) -> tuple[int, int]:
    """The two chunks of `rank` among `size` ranks, in ascending order."""
    return rank, 2 * size - 1 - rank


def zigzag_ranges(total: int, size: int, rank: int) -> list[tuple[int, int]]:
    """The row positions of `rank` as ascending ranges (start, stop).

    Args:
        total: T, a multiple of 2 * `size` (any T for a single rank).
        size: R.
        rank: which rank.
    """
    if size == 1:
        return [(0, total)]
    chunk = total // (2 * size)
    return [(i * chunk, (i + 1) * chunk) for i in zigzag_chunks(size, rank)]


def contiguous_range(total: int, size: int, rank: int) -> tuple[int, int]:
    """The row positions (start, stop) of `rank` in the contiguous order."""
    part = total // size
    return rank * part, (rank + 1) * part


def zigzag_index(total: int, size: int, rank: int) -> Tensor:
    """int64 [T / R]: the row positions that `rank` holds, in the order in which it holds them."""
    return torch.cat([torch.arange(start, stop) for start, stop in zigzag_ranges(total, size, rank)])


def zigzag_order(total: int, size: int) -> Tensor:
    """int64 [T]: the positions of rank 0, then those of rank 1, ...: what a gather over the ranks yields."""
    return torch.cat([zigzag_index(total, size, rank) for rank in range(size)])


def inverse(order_T: Tensor) -> Tensor:
    """The permutation that undoes `order_T`."""
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(len(order_T))
    return inverse_T


@dataclass(frozen=True)
class Piece:
    """Row positions `start` to `stop`, and where the segments lie in them.

    Attributes:
        start, stop: the piece's range in the row.
        lengths: tokens of each segment inside the piece, empty for an empty piece.
        carried: tokens of the first of them that lie before the piece.
        goes_on: whether the last of them goes on after the piece.
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    carried: int
    goes_on: bool

    @classmethod
    def cut(cls, segments: CuSeqlens, start: int, stop: int) -> "Piece":
        """The piece of the row that `segments` divide."""
        if start == stop:
            return cls(start, stop, (), 0, False)
        offsets = np.asarray(segments.host)
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        after = int(np.searchsorted(offsets, stop, side="left"))
        inside = np.clip(offsets[first : after + 1], start, stop)
        return cls(
            start,
            stop,
            tuple(np.diff(inside).tolist()),
            start - segments.host[first],
            segments.host[after] > stop,
        )

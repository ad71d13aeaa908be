"""Where the patches of pictures lie: rows and columns, and the learned positions around them.

Axes: P patches of all pictures, back to back; 4 corners. A picture of (t, h, w) patches gives them frame by
frame, in each frame one square of merge x merge patches after the other, so that those of a token are
neighbours (the order of transformers' `Qwen2VLImageProcessor`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Patches of a picture: frames, rows, columns."""


def patch_places(grids: Sequence[Grid], merge: int) -> Tensor:
    """int64 [P, 2] on the host: row and column of every patch in its picture."""
    parts = []
    for frames, rows, columns in grids:
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
        squares = places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
        parts.append(squares.reshape(-1, 2).repeat(frames, 1))
    return torch.cat(parts)


def corner_weights(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of a square grid of learned positions, stretched over each picture.

    Returns:
        (index_4P int64, weight_4P float32) on the host: rows of the table of side^2 positions, and their
        shares. The ends of a picture lie on the ends of the grid.
    """
    indices, weights = [], []
    for frames, rows, columns in grids:
        place_P2 = patch_places([(1, rows, columns)], merge)
        (low_r, high_r, part_r), (low_c, high_c, part_c) = (
            [values[place_P2[:, axis]] for values in _stretched(count, side)]
            for axis, count in enumerate((rows, columns))
        )
        index_4P = torch.stack([r * side + c for r in (low_r, high_r) for c in (low_c, high_c)])
        weight_4P = torch.stack([r * c for r in (1 - part_r, part_r) for c in (1 - part_c, part_c)])
        indices.append(index_4P.repeat(1, frames))
        weights.append(weight_4P.repeat(1, frames))
    return torch.cat(indices, dim=1), torch.cat(weights, dim=1)


def _stretched(count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `count` places: the learned positions before and behind it, and how far it is past the
    former."""
    at = torch.linspace(0, side - 1, count)
    low = at.long()
    return low, (low + 1).clamp(max=side - 1), at - low

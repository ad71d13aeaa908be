"""`Picture`: one picture as the model's processor gave it, small enough to keep.

Axes: P patches, F numbers of a patch (C channels x frames x S pixels), V distinct values of a channel.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Patches of a picture and how they lie.

    A processor makes at most 256 values of each channel's bytes, and repeats a still picture for every frame
    of a patch. So each channel keeps its values once and a byte for each pixel: an eighth of float32.

    Attributes:
        grid: patches: frames, rows, columns.
        merge: patches along one side of the square that becomes one token.
        codes: uint8 [P, C, 1 or frames, S], which of its channel's values a pixel has; or float32 numbers
            where a channel has more than 256 values.
        values_CV: float32, the values of each channel, its last repeated; empty if `codes` are numbers.
        frames: of a patch.
    """

    grid: Grid
    merge: int
    codes: NDArray[Any]
    values_CV: NDArray[np.float32]
    frames: int

    @classmethod
    def of(
        cls, patches_PF: NDArray[np.float32], grid: Grid, *, merge: int, channels: int, frames: int
    ) -> "Picture":
        """Keeps the patches [P, F] of a processor; `patches` gives the same bits back."""
        numbers = patches_PF.astype(np.float32, copy=False).reshape(len(patches_PF), channels, frames, -1)
        if (numbers == numbers[:, :, :1]).all():
            numbers = numbers[:, :, :1]
        tables = [np.unique(numbers[:, channel]) for channel in range(channels)]
        most = max(len(table) for table in tables)
        if most > 256:
            return cls(grid, merge, numbers, np.zeros((channels, 0), np.float32), frames)
        codes = np.empty(numbers.shape, np.uint8)
        for channel, table in enumerate(tables):
            codes[:, channel] = np.searchsorted(table, numbers[:, channel])
        padded = [np.pad(table, (0, most - len(table)), mode="edge") for table in tables]
        return cls(grid, merge, codes, np.stack(padded), frames)

    @property
    def tokens(self) -> int:
        """Tokens that stand for the picture."""
        count, rows, columns = self.grid
        return count * rows * columns // self.merge**2

    def patches(self) -> NDArray[np.float32]:
        """[P, F] float32, as the processor gave them."""
        numbers = self.codes
        if self.values_CV.shape[1]:
            channels = np.arange(numbers.shape[1])[None, :, None, None]
            numbers = self.values_CV[channels, numbers]
        repeats = self.frames // numbers.shape[2]
        return np.repeat(numbers, repeats, axis=2).reshape(len(numbers), -1).astype(np.float32, copy=False)

    def digest(self) -> str:
        """Of the patches, whole."""
        return hashlib.sha256(repr(self.grid).encode() + self.patches().tobytes()).hexdigest()

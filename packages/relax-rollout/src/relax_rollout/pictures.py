"""Pictures of a prompt: the patches that the model's processor gave, and where their tokens lie.

Axes: P patches, F numbers of a patch (C channels x frames x S pixels), V distinct values of a channel, L
tokens of one prompt or sample.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""Patches of a picture: frames, rows, columns."""


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

    @property
    def features(self) -> int:
        """Numbers of a patch (F)."""
        return int(self.codes.shape[1] * self.codes.shape[3] * self.frames)

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


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPicture:
    """A picture of a prompt or sample, and the place of its first token there; its other tokens follow."""

    picture: Picture
    start: int

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.start + self.picture.tokens


def multi_positions(length: int, pictures: Sequence[PlacedPicture]) -> NDArray[np.int64]:
    """[3, L]: position of every token by frame, row and column.

    Text counts on by one in all three. A picture's tokens count their frames, rows and columns from where the
    text before it ended, and the text behind goes on where the longer side ended (transformers'
    `get_rope_index`).
    """
    parts, at, position = [], 0, 0
    for one in pictures:
        text = one.start - at
        parts.append(_text(position, text))
        position += text
        frames, rows, columns = one.picture.grid
        merge = one.picture.merge
        sides = (frames, rows // merge, columns // merge)
        parts.append(np.indices(sides, dtype=np.int64).reshape(3, -1) + position)
        position += max(sides[1:])
        at = one.end
    return np.concatenate([*parts, _text(position, length - at)], axis=1)


def next_position(length: int, pictures: Sequence[PlacedPicture]) -> int:
    """Position of the token behind `length` ones, which is text."""
    spared = (one.picture.tokens - max(one.picture.grid[1:]) // one.picture.merge for one in pictures)
    return length - sum(spared)


def _text(start: int, count: int) -> NDArray[np.int64]:
    return np.tile(np.arange(start, start + count, dtype=np.int64), (3, 1))

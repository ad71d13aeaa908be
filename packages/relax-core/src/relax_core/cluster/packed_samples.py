"""Samples as they travel between processes: a few long arrays, whatever their number.

Axes: N samples, T tokens of all of them back to back.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from relax_rollout.pictures import PlacedPicture
from torch import Tensor

from relax_core.trainer.sample import Sample


@dataclass(frozen=True)
class PackedSamples:
    """Samples that all have the same columns.

    Attributes:
        lengths, groups: of each of the N samples.
        tokens_T: int64 [T].
        mask_T: float32 [T].
        columns: float32 [T] by name.
        pictures: of each of the N samples.
    """

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    tokens_T: NDArray[np.int64]
    mask_T: NDArray[np.float32]
    columns: Mapping[str, NDArray[np.float32]]
    pictures: tuple[tuple[PlacedPicture, ...], ...]

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> "PackedSamples":
        """Samples on the host, at least one."""
        return cls(
            tuple(len(sample.tokens_L) for sample in samples),
            tuple(sample.group for sample in samples),
            torch.cat([sample.tokens_L for sample in samples]).numpy(),
            torch.cat([sample.mask_L for sample in samples]).numpy(),
            {name: torch.cat([s.columns[name] for s in samples]).numpy() for name in samples[0].columns},
            tuple(sample.pictures for sample in samples),
        )

    def unpack(self) -> list[Sample]:
        """The samples, on the same memory: not to be written to."""
        tokens, mask = split(self.tokens_T, self.lengths), split(self.mask_T, self.lengths)
        columns = {name: split(column_T, self.lengths) for name, column_T in self.columns.items()}
        return [
            Sample(tokens[i], mask[i], group, {name: parts[i] for name, parts in columns.items()}, pictures)
            for i, (group, pictures) in enumerate(zip(self.groups, self.pictures, strict=True))
        ]


def split(values_T: "NDArray[np.float32] | NDArray[np.int64]", lengths: Sequence[int]) -> list[Tensor]:
    """An array of all samples as one tensor of each, on the same memory."""
    with warnings.catch_warnings():
        # torch knows no tensors that are read-only.
        warnings.simplefilter("ignore", UserWarning)
        return list(torch.split(torch.from_numpy(values_T), list(lengths)))

"""`BatchPlaces`: where the tokens of micro-batches lie among those of a whole mini-batch.

Axes: B tokens of all samples of a mini-batch, end to end, S scored positions of one micro-batch.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from relax_kernels import upload
from torch import Tensor

from relax_core.trainer.sample import MicroBatch, Sample


class BatchPlaces:
    """The places of tokens when all samples of a mini-batch are laid end to end.

    Args:
        samples: of the mini-batch.
        device: of the micro-batches.

    Attributes:
        total: B.
    """

    def __init__(self, samples: Sequence[Sample], device: torch.device) -> None:
        *self._starts, self.total = accumulate((len(s.tokens_L) for s in samples), initial=0)
        self._device = device

    def of_predicted(self, batch: MicroBatch) -> Tensor:
        """Of each token that is predicted, int64 [S] on the device."""
        layout = batch.layout
        offset_N = torch.tensor([self._starts[i] for i in batch.members] or [0])
        place_T = offset_N[layout.sample_ids_T.clamp(min=0)] + layout.position_ids_T
        return upload(place_T[batch.predicted_S], self._device)

    def columns(self, columns_B: Mapping[str, Tensor], batch: MicroBatch) -> Mapping[str, Tensor]:
        """The columns [S] of a micro-batch's samples, and those of the mini-batch at its predicted tokens."""
        if not columns_B:
            return batch.columns_S
        place_S = self.of_predicted(batch)
        return {**batch.columns_S, **{name: x_B[place_S] for name, x_B in columns_B.items()}}

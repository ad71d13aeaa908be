"""`Sample` and `MicroBatch`: what the trainer is fed.

Axes: L tokens of one sample, T packed positions of a micro-batch, S scored positions: those whose next token
carries loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from relax_core.packing import PackedLayout


@dataclass(frozen=True)
class Sample:
    """One sequence to train on, every column aligned to its tokens.

    Attributes:
        tokens_L: int64 [L].
        mask_L: float32 [L]; above 0 where the token is a target of the loss. The first token never is one.
        group: samples of one prompt share it.
        columns: further float32 [L] values by name (advantage, old_logprob, ...), read where the mask is set.
    """

    tokens_L: Tensor
    mask_L: Tensor
    group: int = 0
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens_L)
        for name, column in {"mask": self.mask_L, **self.columns}.items():
            if column.shape != (length,):
                raise ValueError(f"column {name!r} has shape {tuple(column.shape)}: expected ({length},)")
        if length == 0 or self.mask_L[0] != 0:
            raise ValueError(
                "a sample needs a token, and its first token cannot be a target: nothing predicts it"
            )

    def with_columns(self, **columns: Tensor) -> "Sample":
        """The same sample with further columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples on the device, with the scored positions picked out.

    Attributes:
        layout: order and lengths of the samples.
        members: their indices in the batch.
        tokens_T: int64 [T]; padding holds 0.
        mask_T: float32 [T], aligned to the tokens.
        scored_S: int64 [S], the positions that predict a target.
        targets_S: int64 [S], the token each of them predicts.
        columns_S: float32 [S] by name, of the predicted token.
    """

    layout: PackedLayout
    members: tuple[int, ...]
    tokens_T: Tensor
    mask_T: Tensor
    scored_S: Tensor
    targets_S: Tensor
    columns_S: Mapping[str, Tensor]

    @classmethod
    def pack(
        cls,
        samples: Sequence[Sample],
        members: Sequence[int],
        device: torch.device,
        *,
        pad_to_multiple: int = 1,
    ) -> "MicroBatch":
        """Packs the `members` of `samples` in the order given."""
        chosen = [samples[i] for i in members]
        layout = PackedLayout.build([len(s.tokens_L) for s in chosen], pad_to_multiple=pad_to_multiple)
        tokens_T = layout.pack([s.tokens_L for s in chosen], dtype=torch.int64)
        mask_T = layout.pack([s.mask_L for s in chosen], dtype=torch.float32)
        scored_S = layout.shift(mask_T, 1).nonzero().squeeze(1)
        predicted_S = layout.ahead(1)[0][scored_S]
        columns_S = {
            name: layout.pack([s.columns[name] for s in chosen], dtype=torch.float32)[predicted_S].to(device)
            for name in chosen[0].columns
        }
        return cls(
            layout=layout,
            members=tuple(members),
            tokens_T=tokens_T.to(device),
            mask_T=mask_T.to(device),
            scored_S=scored_S.to(device),
            targets_S=tokens_T[predicted_S].to(device),
            columns_S=columns_S,
        )

    def draft_targets(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """What draft layer `depth` (0 for the first) predicts: the token `depth + 2` places ahead.

        Returns:
            (positions int64, targets int64, weights float32), each one entry per position whose token that
            far ahead lies in the same sample and carries loss.
        """
        distance = depth + 2
        weight_T = self.layout.shift(self.mask_T, distance)
        positions = weight_T.nonzero().squeeze(1)
        targets = self.tokens_T[self.layout.ahead(distance, self.tokens_T.device)[0][positions]]
        return positions, targets, weight_T[positions]

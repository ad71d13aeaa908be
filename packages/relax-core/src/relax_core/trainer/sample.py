"""`Sample` and `MicroBatch`: what the trainer is fed.

Axes: L tokens of one sample, T packed positions of a micro-batch (those of this context-parallel rank), S
scored positions: those whose next token carries loss, P positions that a draft layer predicts from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from relax_kernels import upload
from relax_rollout.pictures import PlacedPicture
from torch import Tensor

from relax_core.packing import PackedLayout
from relax_core.packing.pictures import RowPictures
from relax_core.packing.zigzag import zigzag_order


@dataclass(frozen=True)
class Sample:
    """One sequence to train on, every column aligned to its tokens.

    Attributes:
        tokens_L: int64 [L].
        mask_L: float32 [L]; above 0 where the token is a target of the loss. The first token never is one.
        group: samples of one prompt share it.
        columns: further float32 [L] values by name (advantage, old_logprob, ...), read where the mask is set.
        pictures: in the order of their tokens, which do not overlap.
    """

    tokens_L: Tensor
    mask_L: Tensor
    group: int = 0
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    pictures: tuple[PlacedPicture, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.tokens_L)
        for name, column in {"mask": self.mask_L, **self.columns}.items():
            if column.shape != (length,):
                raise ValueError(f"column {name!r} has shape {tuple(column.shape)}: expected ({length},)")
        if length == 0 or self.mask_L[0] != 0:
            raise ValueError(
                "a sample needs a token, and its first token cannot be a target: nothing predicts it"
            )

        end = 0
        for number, one in enumerate(self.pictures):
            if not end <= one.start <= length - one.picture.tokens:
                raise ValueError(
                    f"picture {number} has {one.picture.tokens} tokens from place {one.start}: they must lie "
                    f"between place {end}, where the one before ends, and the sample's end {length}"
                )
            end = one.end

    def with_columns(self, **columns: Tensor) -> "Sample":
        """The same sample with further columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Draft:
    """What draft layer `depth` (0 for the first) sees and predicts: at t, the token `depth + 2` places ahead.

    Attributes:
        tokens_T: int64 [T], the token `depth + 1` places ahead in the same sample, 0 where there is none.
        positions_P: int64 [P], positions whose target lies in the same sample and carries loss.
        targets_P: int64 [P], what each of them predicts.
        weights_P: float32 [P], the targets' mask.
        trunk_P: int64 [P], the place *in the whole row* from which the trunk predicts the same token.
    """

    tokens_T: Tensor
    positions_P: Tensor
    targets_P: Tensor
    weights_P: Tensor
    trunk_P: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples on the device, with the scored positions picked out; a context-parallel rank's part.

    Attributes:
        layout: order and lengths of the samples.
        members: their indices in the batch; none for a micro-batch that only keeps ranks in step.
        tokens_T: int64 [T]; padding holds 0.
        scored_S: int64 [S], the positions that predict a target.
        targets_S: int64 [S], the token each of them predicts.
        columns_S: float32 [S] by name, of the predicted token.
        drafts: one per draft depth.
        sequence_S: int64 [S], which member each predicted token belongs to.
        predicted_S: int64 [S] on the host, where in the whole row the predicted tokens lie.
        pictures: of the whole row, None if it has none.
        row_places_T: int64, where in the whole row the parts of all context-parallel ranks lie, in rank
            order; None if this rank has the whole row, or no draft layer needs it.
    """

    layout: PackedLayout
    members: tuple[int, ...]
    tokens_T: Tensor
    scored_S: Tensor
    targets_S: Tensor
    columns_S: Mapping[str, Tensor]
    drafts: tuple[Draft, ...]
    sequence_S: Tensor
    predicted_S: Tensor
    row_places_T: Tensor | None
    pictures: RowPictures | None = None

    @classmethod
    def pack(
        cls,
        samples: Sequence[Sample],
        members: Sequence[int],
        device: torch.device,
        *,
        pad_to_multiple: int = 1,
        context_size: int = 1,
        context_rank: int = 0,
        draft_depths: int = 0,
        row_length: int | None = None,
    ) -> "MicroBatch":
        """Packs the `members` of `samples` in the order given.

        Args:
            samples: of the whole mini-batch.
            members: indices; none gives a micro-batch of one token without a target.
            device: where the tensors are to lie.
            pad_to_multiple: see `PackedLayout`.
            context_size: ranks that share the row.
            context_rank: which of them this is.
            draft_depths: draft layers to prepare for.
            row_length: see `PackedLayout`; of no account without members.
        """
        chosen = [samples[i] for i in members] or [Sample(torch.zeros(1, dtype=torch.int64), torch.zeros(1))]
        lengths = [len(s.tokens_L) for s in chosen]
        layout = PackedLayout.build(
            lengths,
            pad_to_multiple=pad_to_multiple,
            context_size=context_size,
            context_rank=context_rank,
            row_length=row_length if members else None,
        )
        row = _Row.of(layout, chosen)
        scored_S, predicted_S, _weights = row.targets(1)
        return cls(
            layout=layout,
            members=tuple(members),
            tokens_T=upload(layout.local(row.tokens_T), device),
            scored_S=upload(scored_S, device),
            targets_S=upload(row.tokens_T[predicted_S], device),
            columns_S={
                name: upload(
                    layout.pack([s.columns[name] for s in chosen], dtype=torch.float32)[predicted_S], device
                )
                if members
                else torch.zeros(0, device=device)
                for name in samples[0].columns
            },
            drafts=tuple(row.draft(depth, device) for depth in range(draft_depths)),
            sequence_S=upload(layout.sample_ids_T[predicted_S], device),
            predicted_S=predicted_S,
            row_places_T=(
                upload(zigzag_order(layout.padded_total, context_size), device)
                if context_size > 1 and draft_depths
                else None
            ),
            pictures=RowPictures.pack(
                layout, [s.pictures for s in chosen], device, for_drafts=draft_depths > 0
            ),
        )


@dataclass(frozen=True)
class _Row:
    """A whole packed row on the host, from which a rank takes its part.

    Attributes:
        layout: where the samples lie.
        tokens_T, mask_T: of the whole row.
    """

    layout: PackedLayout
    tokens_T: Tensor
    mask_T: Tensor

    @classmethod
    def of(cls, layout: PackedLayout, samples: Sequence[Sample]) -> "_Row":
        return cls(
            layout,
            layout.pack([s.tokens_L for s in samples], dtype=torch.int64),
            layout.pack([s.mask_L for s in samples], dtype=torch.float32),
        )

    def targets(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's positions whose token `distance` ahead carries loss, where that token lies in the whole
        row, and its mask."""
        weight_T = self.layout.local(self.layout.shift(self.mask_T, distance))
        positions_P = weight_T.nonzero().squeeze(1)
        ahead_P = self.layout.local(self.layout.ahead(distance)[0])[positions_P]
        return positions_P, ahead_P, weight_T[positions_P]

    def draft(self, depth: int, device: torch.device) -> Draft:
        positions_P, ahead_P, weights_P = self.targets(depth + 2)
        return Draft(
            tokens_T=upload(self.layout.local(self.layout.shift(self.tokens_T, depth + 1)), device),
            positions_P=upload(positions_P, device),
            targets_P=upload(self.tokens_T[ahead_P], device),
            weights_P=upload(weights_P, device),
            trunk_P=upload(ahead_P - 1, device),
        )

"""`RowPictures`: the pictures of all samples of a packed row, and where their tokens lie.

Axes: T packed positions of the whole row, L tokens of one sample, P patches, F numbers of a patch, M tokens
of all pictures, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from relax_kernels import upload
from relax_rollout.pictures import Grid, Picture, PlacedPicture, multi_positions
from torch import Tensor

from relax_core.packing.layout import PackedLayout


@dataclass
class RowPictures:
    """Pictures back to back, in the order of their tokens.

    Attributes:
        patches_PF: float32, on the device.
        grids: patches of each picture: frames, rows, columns.
        member_T: int64 on the host, which picture token (0 to M - 1) a position of the whole row holds, -1
            for text.
        positions_3T: int64 on the host, frame, row and column position of every token in its sample.
        for_drafts: whether draft layers will look at them.
        seen_MD: what the tower made of them: the trunk's pass keeps it for the draft layers.
    """

    patches_PF: Tensor
    grids: tuple[Grid, ...]
    member_T: Tensor
    positions_3T: Tensor
    for_drafts: bool = False
    seen_MD: Tensor | None = field(default=None, compare=False)

    @classmethod
    def pack(
        cls,
        layout: PackedLayout,
        pictures: Sequence[Sequence[PlacedPicture]],
        device: torch.device,
        *,
        for_drafts: bool = False,
    ) -> "RowPictures | None":
        """The pictures of the samples of `layout`, in its order; None if no sample has one."""
        placed = [one for of_sample in pictures for one in of_sample]
        if not placed:
            return None
        first, members, positions = 0, [], []
        for length, of_sample in zip(layout.lengths, pictures, strict=True):
            member_L = torch.full((length,), -1)
            for one in of_sample:
                member_L[one.start : one.end] = torch.arange(first, first + one.picture.tokens)
                first += one.picture.tokens
            members.append(member_L)
            positions.append(torch.from_numpy(multi_positions(length, of_sample)))
        return cls(
            torch.cat([patches_on(device, one.picture) for one in placed]),
            tuple(one.picture.grid for one in placed),
            layout.pack(members, dtype=torch.int64, fill=-1),
            torch.stack([layout.pack([p[row] for p in positions], dtype=torch.int64) for row in range(3)]),
            for_drafts,
        )

    @property
    def tokens(self) -> int:
        """M: tokens of all pictures."""
        return int(self.member_T.max()) + 1

    def placed(
        self, layout: PackedLayout, ahead: int, device: torch.device, *, piece: tuple[int, int] = (0, 1)
    ) -> tuple[Tensor, Tensor]:
        """Which of this rank's positions look `ahead` places onto a picture token, and onto which.

        Args:
            layout: of the row.
            ahead: 0 for the tokens themselves.
            device: of the result.
            piece: (rank, ranks) among those that hold consecutive parts of this rank's share of the row.

        Returns:
            (positions, picture tokens), both int64 and of equal length.
        """

        def build() -> tuple[Tensor, Tensor]:
            member_T = layout.shift(self.member_T, ahead, fill=-1) if ahead else self.member_T
            member_T = layout.local(member_T).chunk(piece[1])[piece[0]]
            positions = (member_T >= 0).nonzero().squeeze(1)
            return upload(positions, device), upload(member_T[positions], device)

        return layout.table(("pictures", ahead, piece, device), build)


def patches_on(device: torch.device, picture: Picture) -> Tensor:
    """`picture.patches()` [P, F] on a device, bit for bit.

    A byte travels for each pixel, and the device looks its value up.
    """
    numbers = upload(torch.from_numpy(picture.codes), device)
    if picture.values_CV.shape[1]:
        values_CV = upload(torch.from_numpy(picture.values_CV), device)
        channels = [
            values_V.index_select(0, codes.flatten().int()).view_as(codes)
            for values_V, codes in zip(values_CV, numbers.unbind(1), strict=True)
        ]
        numbers = torch.stack(channels, dim=1)
    count, channel, frames, pixels = numbers.shape
    if frames < picture.frames:
        numbers = numbers.expand(count, channel, picture.frames, pixels)
    return numbers.reshape(count, -1)

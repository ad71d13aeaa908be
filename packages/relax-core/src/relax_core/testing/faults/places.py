"""What one rank of a group should take, taken from another's place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from relax_bridge.partition import Cut, GroupedSplit, Range

from relax_core.model.balance import RoutingPass
from relax_core.packing.pictures import RowPictures
from relax_core.testing.row import Row


@contextmanager
def mask_of_another_rank(row: Row) -> Iterator[None]:
    """The tokens are spread over one tensor group, the mask that says which count over another."""
    mask = RoutingPass._mask

    def elsewhere(self: RoutingPass, ahead: int) -> torch.Tensor:
        return mask(replace(self, tensor_group=_Neighbour(self.tensor_group), _counted={}), ahead)

    with patch.object(RoutingPass, "_mask", elsewhere):
        yield


@contextmanager
def key_of_other_ranks(row: Row) -> Iterator[None]:
    """Ranks that share a key/value head gather it over a tensor group in which they stand elsewhere."""

    def elsewhere(shares_T2S: torch.Tensor, *, group: Any) -> torch.Tensor:
        everyone: torch.Tensor = gather_from_sequence_parallel_region(shares_T2S, group=group)
        # As seen by the rank half a group further, which has another head.
        return everyone.roll(len(everyone) // 2, dims=0)

    with patch("relax_core.model.attention.gather_from_sequence_parallel_region", elsewhere):
        yield


@contextmanager
def pictures_of_another_rank(row: Row) -> Iterator[None]:
    """What the tower saw is put into the tokens of the neighbour among the tensor ranks."""
    placed = RowPictures.placed

    def elsewhere(self: RowPictures, *args: Any, piece: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        return placed(self, *args, piece=((piece[0] + 1) % piece[1], piece[1]))

    with patch.object(RowPictures, "placed", elsewhere):
        yield


@contextmanager
def gates_of_another_rank(row: Row) -> Iterator[None]:
    """Ranks that share a key/value head take the gates of one another's query heads."""
    cut = GroupedSplit.cut

    def elsewhere(self: GroupedSplit, size: int, rank: int, ranks: int) -> Cut:
        own = cut(self, size, rank, ranks)
        sharing = ranks // self.groups
        if sharing < 2:
            return own
        queries, gates, *rest = own.ranges
        share = rank % sharing
        moved = gates.start + (sharing - 1 - 2 * share) * gates.size
        return Cut((queries, Range(moved, gates.size), *rest))

    with patch.object(GroupedSplit, "cut", elsewhere):
        yield


class _Neighbour:
    """A group as the next rank sees it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return int(self._group.size())

    def rank(self) -> int:
        return (int(self._group.rank()) + 1) % self.size()

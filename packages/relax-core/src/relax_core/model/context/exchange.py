"""Moving tokens between context-parallel ranks, differentiably, by tables made once per micro-batch.

Axes: T tokens held here, S tokens sent or received, R ranks, H heads, F features of a head, P features of all
heads that one rank will hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from megatron.core.tensor_parallel import all_to_all
from relax_kernels import upload
from torch.autograd.function import once_differentiable

from relax_core.packing import PackedLayout
from relax_core.packing.zigzag import inverse, zigzag_order

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Selection:
    """Rows to take, and what the backward pass needs to give their gradients back.

    Attributes:
        index_S: rows taken; each row of the input at least once.
        first_T: for each input row its first place among them.
        again_place, again_row: the further places of rows that are taken more than once, and those rows.
        all_in_order: whether the rows are the input itself.
    """

    index_S: torch.Tensor
    first_T: torch.Tensor
    again_place: torch.Tensor
    again_row: torch.Tensor
    all_in_order: bool

    @classmethod
    def of(cls, index_S: np.ndarray, device: torch.device) -> "Selection":
        """The selection of rows `index_S` (host), its tables on `device`."""
        places = np.arange(len(index_S))
        host_first = np.empty(index_S.max() + 1, dtype=np.int64)
        # Of several places the one that is written last stays.
        host_first[index_S[::-1]] = places[::-1]
        again = places[host_first[index_S] != places]
        index, first, again_place, again_row = (
            upload(torch.from_numpy(np.asarray(table, dtype=np.int64)), device)
            for table in (index_S, host_first, again, index_S[again])
        )
        return cls(index, first, again_place, again_row, np.array_equal(index_S, places))


def take(x_T: torch.Tensor, selection: Selection) -> torch.Tensor:
    """`x_T[selection.index_S]`; the gradient is gathered, not scattered, so that its order is fixed."""
    if selection.all_in_order:
        return x_T
    return cast(torch.Tensor, _Take.apply(x_T, selection))  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, selection: Selection) -> torch.Tensor:
        ctx.selection = selection
        return x_T.index_select(0, selection.index_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: torch.Tensor) -> tuple[torch.Tensor, None]:
        selection: Selection = ctx.selection
        grad_T = grad_S.index_select(0, selection.first_T)
        if len(selection.again_row):
            grad_T.index_add_(0, selection.again_row, grad_S.index_select(0, selection.again_place))
        return grad_T, None


@dataclass(frozen=True)
class Route:
    """One all-to-all of tokens: what this rank sends to each other, and the order of what it receives.

    Attributes:
        sent: tokens to send, those for rank 0 first.
        send_splits, receive_splits: how many go to and come from each rank.
        ordered: brings the received ones into ascending row positions.
    """

    sent: Selection
    send_splits: list[int]
    receive_splits: list[int]
    ordered: Selection

    @classmethod
    def plan(
        cls, held: Sequence[Ranges], wanted: Sequence[Ranges], rank: int, device: torch.device
    ) -> "Route":
        """The route of `rank` from what each rank holds to what each wants.

        Args:
            held: per rank, ascending ranges of row positions; they divide the row between the ranks.
            wanted: per rank, ascending ranges of row positions; several ranks may want a token.
            rank: this one.
            device: of the tables.
        """
        mine = _positions(held[rank])
        sent = [_inside(mine, ranges) for ranges in wanted]
        received = [positions[_inside(positions, wanted[rank])] for positions in map(_positions, held)]
        return cls(
            Selection.of(np.concatenate(sent), device),
            [len(part) for part in sent],
            [len(part) for part in received],
            Selection.of(np.argsort(np.concatenate(received), kind="stable"), device),
        )


def exchange(x_T: torch.Tensor, route: Route, group: Any) -> torch.Tensor:
    """The tokens that `route` brings here, in ascending row positions: one all-to-all each way."""
    sent_S = take(x_T, route.sent)
    received_S = all_to_all(group, sent_S, route.receive_splits, route.send_splits)
    return take(received_S, route.ordered)


def gathered_order(layout: PackedLayout, device: torch.device) -> tuple[Selection, Selection]:
    """(to row order, back): between all ranks' parts one after the other, and the row."""

    def build() -> tuple[Selection, Selection]:
        order_T = zigzag_order(layout.padded_total, layout.context_size)
        return Selection.of(inverse(order_T).numpy(), device), Selection.of(order_T.numpy(), device)

    return layout.table(("gathered order", device), build)


def spread_heads(parts_THF: Sequence[torch.Tensor], layout: PackedLayout, group: Any) -> torch.Tensor:
    """From this rank's tokens of all heads to the whole row of this rank's heads, by one all-to-all.

    Args:
        parts_THF: tensors [T / R, H_i, F_i] of one dtype, each H_i a multiple of R; rank r gets the r-th
            share of each.
        layout: the row.
        group: the context-parallel ranks.

    Returns:
        [T, P] in row order, P = sum of H_i / R * F_i: the shares side by side.
    """
    split = [part.reshape(len(part), group.size(), -1).transpose(0, 1) for part in parts_THF]
    sent_RTP = torch.cat(split, dim=-1)
    received_TP = all_to_all(group, sent_RTP.flatten(0, 1))
    return take(received_TP, gathered_order(layout, received_TP.device)[0])


def join_heads(x_THF: torch.Tensor, layout: PackedLayout, group: Any) -> torch.Tensor:
    """The way back: [T, H / R, F], the whole row of this rank's heads, to [T / R, H, F]."""
    ranks = group.size()
    sent_TP = take(x_THF.flatten(1), gathered_order(layout, x_THF.device)[1])
    received_RTP = all_to_all(group, sent_TP).view(ranks, layout.local_total, -1)
    joined: torch.Tensor = received_RTP.transpose(0, 1).contiguous()
    return joined.view(layout.local_total, -1, x_THF.shape[-1])


def _positions(ranges: Ranges) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def _inside(positions: np.ndarray, ranges: Ranges) -> np.ndarray:
    """Places of those `positions` that lie in one of `ranges`."""
    keep = np.zeros(len(positions), dtype=bool)
    for start, stop in ranges:
        keep |= (positions >= start) & (positions < stop)
    return np.flatnonzero(keep)

"""Routes of tokens between ranks, played through on one host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.model.context.delta import _routes
from relax_core.model.context.delta_state import pieces_of
from relax_core.model.context.exchange import Selection, take
from relax_core.packing import PackedLayout

CPU = torch.device("cpu")


def layouts(lengths, size):
    return [PackedLayout.build(lengths, context_size=size, context_rank=rank) for rank in range(size)]


def play(held, routes):
    """What every rank has after the all-to-all of `routes`."""
    sent = [torch.split(x[r.sent.index_S], r.send_splits) for x, r in zip(held, routes, strict=True)]
    arrived = [torch.cat([sent[source][rank] for source in range(len(held))]) for rank in range(len(held))]
    for x, route, rank in zip(arrived, routes, range(len(held)), strict=True):
        assert route.receive_splits == [len(sent[source][rank]) for source in range(len(held))]
        assert len(x) == len(route.ordered.index_S)
    return [x[route.ordered.index_S] for x, route in zip(arrived, routes, strict=True)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(2, 8), st.integers(0, 3))
def test_pieces_arrive_with_the_tokens_before_them_and_go_back(lengths, size, before):
    every = layouts(lengths, size)
    row_T = torch.arange(every[0].padded_total)
    there, back = zip(*(_routes(layout, before, CPU) for layout in every), strict=True)
    got = play([layout.local(row_T) for layout in every], there)
    for layout, own in zip(every, got, strict=True):
        piece = pieces_of(layout)[layout.context_rank]
        halo = min(before, piece.carried)
        assert own.tolist() == list(range(piece.start - halo, piece.stop))
    exact = [own[len(own) - layout.local_total :] for layout, own in zip(every, got, strict=True)]
    for layout, own in zip(every, play(exact, back), strict=True):
        assert torch.equal(own, layout.local(row_T))


@pytest.mark.parametrize("index", [[2, 0, 1], [0, 1, 2, 1], [1, 0, 2, 1, 1, 0]])
def test_a_selection_gives_its_gradient_back_to_every_row(index):
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    selection = Selection.of(np.asarray(index), CPU)
    assert torch.autograd.gradcheck(lambda x: take(x, selection), (x,))

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.data import Cursor, DataError
from relax_core.data.cursor import epoch_order


@settings(deadline=None)
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    takes=st.lists(st.integers(0, 30), max_size=6),
)
def test_any_interruption_gives_the_same_draws(size, seed, shuffle, takes):
    whole = Cursor(size, seed=seed, shuffle=shuffle).take(sum(takes))
    resumed, state = [], None
    for count in takes:  # a new process for every piece
        cursor = Cursor(size, seed=seed, shuffle=shuffle)
        if state is not None:
            cursor.load_state_dict(json.loads(state))
        resumed += cursor.take(count)
        state = json.dumps(cursor.state_dict())
    assert resumed == whole


@settings(deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 4))
def test_every_epoch_draws_every_row_once(size, seed, epochs):
    drawn = Cursor(size, seed=seed).take(size * epochs)
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_orders_are_those_of_any_machine_and_numpy():
    # PCG64's raw stream for SeedSequence((7, 0)), sorted by hand: numpy promises these bits for good.
    bits = [int(np.random.PCG64(np.random.SeedSequence((7, 0))).random_raw(i + 1)[-1]) for i in range(5)]
    assert epoch_order(5, 7, 0).tolist() == sorted(range(5), key=bits.__getitem__)
    assert epoch_order(5, 7, 0).tolist() == [3, 4, 0, 2, 1]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_without_shuffling_rows_come_in_order():
    assert Cursor(3, seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_it_counts_epochs_and_draws():
    cursor = Cursor(3, seed=0)
    cursor.take(3)
    assert (cursor.epoch, cursor.drawn) == (1, 3)
    cursor.take(1)
    assert (cursor.epoch, cursor.drawn) == (1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 4}, "size 4, this run has 3"),
        ({"seed": 9}, "seed 9, this run has 0"),
        ({"shuffle": False}, "shuffle False, this run has True"),
        ({"position": 3}, "damaged: epoch 0, row 3"),
        ({"epoch": -1}, "damaged: epoch -1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    cursor = Cursor(3, seed=0)
    with pytest.raises(DataError, match=message):
        cursor.load_state_dict({**cursor.state_dict(), **change})


def test_there_must_be_a_row():
    with pytest.raises(DataError, match="no row to draw"):
        Cursor(0, seed=0)

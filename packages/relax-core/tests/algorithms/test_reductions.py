"""Axes: T tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.algorithms import sequence_weights, token_weights
from relax_core.loss import LossReducer
from relax_core.loss.reducer import LossTerm

# Sequences of 3, 1, 0 and 2 counted tokens; the first two in group 5, the others in group 9.
LENGTHS = (4, 2, 1, 3)
MASK_T = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1, 1]).bool()
VALUE_T = torch.tensor([99.0, 1, 2, 6, 99, 7, 99, 99, 10, 20]).double()
GROUPS = (5, 5, 9, 9)


@pytest.mark.parametrize(
    ("kind", "loss", "denominator"),
    [
        ("token_mean", 46 / 6, 6.0),  # (1 + 2 + 6 + 7 + 10 + 20) / 6
        ("sequence_mean", (3 + 7 + 15) / 3, 3.0),  # means 9/3, 7, 30/2; the empty one does not count
        ("group_mean", (16 / 4 + 30 / 2) / 2, 2.0),
        ("fixed_length", 46 / (3 * 8), 3.0),
    ],
)
def test_reduced_values_by_hand(kind, loss, denominator):
    weights = token_weights(kind, MASK_T, LENGTHS, GROUPS, fixed_length=8, dtype=torch.float64)
    assert weights.denominator == denominator
    assert ((weights.weight_T * VALUE_T).sum() / weights.denominator).item() == pytest.approx(loss, rel=1e-14)
    assert weights.weight_T[~MASK_T].tolist() == [0.0] * 4


def test_a_group_without_counted_tokens_does_not_count():
    weights = sequence_weights("group_mean", (2, 0, 0), (1, 2, 2))
    assert weights.weights == (0.5, 0.0, 0.0)
    assert weights.denominator == 1.0


def test_weights_have_the_dtype_asked_for():
    assert token_weights("sequence_mean", MASK_T, LENGTHS).weight_T.dtype == torch.float32


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.sampled_from(["token_mean", "sequence_mean", "group_mean", "fixed_length"]),
)
def test_any_split_into_parts_gives_the_loss_of_the_whole(rows, part_of, kind):
    counts, groups = zip(*rows, strict=True)
    values = [1.0 + i * i for i in range(len(rows))]  # one value per sequence, for all of its tokens
    whole = sequence_weights(kind, counts, groups, fixed_length=7)
    group_tokens = {g: sum(c for c, h in rows if h == g) for g in groups}
    total, denominator = 0.0, 0.0
    for part in range(3):
        mine = [i for i in range(len(rows)) if part_of[i] == part]
        share = sequence_weights(
            kind,
            [counts[i] for i in mine],
            [groups[i] for i in mine],
            group_tokens=group_tokens,
            fixed_length=7,
        )
        denominator += share.denominator
        total += sum(w * counts[i] * values[i] for w, i in zip(share.weights, mine, strict=True))
    assert denominator == pytest.approx(whole.denominator, rel=1e-12)
    expected = sum(w * c * v for w, c, v in zip(whole.weights, counts, values, strict=True))
    assert total == pytest.approx(expected, rel=1e-12)


def test_weights_fit_the_loss_reducer():
    weights = token_weights("group_mean", MASK_T, LENGTHS, GROUPS, dtype=torch.float64)
    reducer = LossReducer({"policy": weights.denominator})
    loss, _ = reducer.reduce([LossTerm("policy", VALUE_T, weights.weight_T)])
    assert loss.item() == pytest.approx(9.5, rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kind": "fixed_length", "token_counts": (1,)},
            "needs a fixed_length of at least 1 token, not None",
        ),
        (
            {"kind": "group_mean", "token_counts": (1, 2)},
            "a group id for each of the 2 sequences; given: none",
        ),
        ({"kind": "group_mean", "token_counts": (1, 2), "group_ids": (1,)}, "2 sequences; given: 1"),
        (
            {"kind": "group_mean", "token_counts": (3,), "group_ids": (1,), "group_tokens": {1: 2}},
            "group 1 has 3 tokens here but 2 in the whole batch",
        ),
    ],
)
def test_missing_or_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sequence_weights(**arguments)


def test_lengths_must_cover_the_mask():
    with pytest.raises(ValueError, match="add up to 9 positions, the mask has 10"):
        token_weights("token_mean", MASK_T, (4, 2, 3))

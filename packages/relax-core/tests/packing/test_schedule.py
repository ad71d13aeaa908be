import random
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_core.packing import SampleCost, plan_micro_batches


@st.composite
def full_micro_batches(draw):
    """(lengths, budget) of samples that fill micro-batches to the last token, which greedy rules miss."""
    budget = draw(st.integers(6, 24))
    lengths = []
    for _ in range(draw(st.integers(1, 6))):
        cuts = sorted(draw(st.sets(st.integers(1, budget - 1), max_size=4)))
        lengths += [end - start for start, end in zip([0, *cuts], [*cuts, budget], strict=True)]
    return draw(st.permutations(lengths)), budget


loose = st.tuples(st.lists(st.integers(1, 12), max_size=60), st.integers(1, 40))
tasks = st.one_of(loose, full_micro_batches())
costs = st.builds(SampleCost, st.integers(1, 10), st.integers(0, 3))  # whole numbers, so that sums are exact


def tokens(lengths, members):
    return sum(lengths[i] for i in members)


@given(tasks, st.integers(1, 5), st.integers(1, 4), costs)
def test_every_sample_once_and_only_a_lone_sample_may_exceed_the_budget(task, ranks, multiple, cost):
    lengths, max_tokens = task
    plan = plan_micro_batches(lengths, max_tokens, ranks=ranks, multiple_of=multiple, cost=cost)
    bins = [members for rank in plan for members in rank]
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert members == sorted(members)
        assert len(members) <= 1 or tokens(lengths, members) <= max_tokens


@given(tasks, st.integers(1, 5), st.integers(1, 4), costs)
def test_every_rank_has_the_same_number_and_none_is_empty_without_need(task, ranks, multiple, cost):
    lengths, max_tokens = task
    plan = plan_micro_batches(lengths, max_tokens, ranks=ranks, multiple_of=multiple, cost=cost)
    assert len(plan) == ranks
    (turns,) = {len(rank) for rank in plan}
    assert turns % multiple == 0
    empty = sum(not members for rank in plan for members in rank)
    assert empty == max(0, ranks * turns - len(lengths))
    # No more turns than packing on one rank needs.
    alone = len(plan_micro_batches(lengths, max_tokens)[0])
    assert turns < alone / ranks + multiple


@given(tasks, st.integers(1, 5), costs)
def test_ranks_differ_no_more_than_micro_batches_of_the_same_turn(task, ranks, cost):
    lengths, max_tokens = task
    plan = plan_micro_batches(lengths, max_tokens, ranks=ranks, cost=cost)
    work = [[sum(cost(lengths[i]) for i in members) for members in rank] for rank in plan]
    assert all(rank == sorted(rank, reverse=True) for rank in work)
    totals = [sum(rank) for rank in work]
    widest = max((max(turn) - min(turn) for turn in zip(*work, strict=True)), default=0.0)
    assert max(totals) - min(totals) <= widest


@given(tasks, st.integers(1, 5))
def test_the_plan_depends_on_the_arguments_alone(task, ranks):
    lengths, max_tokens = task
    assert plan_micro_batches(lengths, max_tokens, ranks=ranks) == plan_micro_batches(
        tuple(lengths), max_tokens, ranks=ranks
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 200))
def test_the_number_of_micro_batches_is_near_the_fewest_possible(lengths, max_tokens):
    # Best-fit-decreasing needs at most 11/9 of the optimum and a bin (Johnson 1973), which the sum bounds.
    count = len(plan_micro_batches(lengths, max_tokens)[0])
    if max(lengths) * 2 > max_tokens:
        return
    # Any two bins together are fuller than the budget, or best fit would have joined them.
    assert count <= 2 * sum(lengths) / max_tokens + 1


def test_micro_batches_are_balanced():
    # Packing alone would give 60 + 60 + 10; spreading gives 50 + 40 + 40.
    (plan,) = plan_micro_batches([10] * 13, 60)
    assert [len(members) for members in plan] == [5, 4, 4]


def test_long_samples_weigh_more_where_attention_is_quadratic():
    # One sample of 8 costs as much as sixteen of 2 when cost is L^2.
    lengths = [8] + [2] * 16
    by_length = plan_micro_batches(lengths, 40, ranks=2)
    by_square = plan_micro_batches(lengths, 40, ranks=2, cost=SampleCost(0, 1))
    assert sorted(tokens(lengths, rank[0]) for rank in by_length) == [20, 20]
    assert sorted(tokens(lengths, rank[0]) for rank in by_square) == [8, 32]


def test_a_sample_longer_than_the_budget_stands_alone():
    assert plan_micro_batches([5, 100, 5], 20) == [[[1], [0, 2]]]


def test_where_spreading_finds_no_room_the_tight_packing_stays():
    # Spreading gives 5 + 2 and 4 + 3, and the last 2 fits nowhere; packed tightly 5 + 3 and 4 + 2 + 2 do.
    assert plan_micro_batches([5, 4, 3, 2, 2], 8) == [[[0, 2], [1, 3, 4]]]


def test_a_tight_packing_is_divided_until_every_rank_has_its_part():
    # Lengths up to the budget: spreading finds no room, and the packing needs fewer than three equal ranks.
    generator = random.Random(340)
    lengths = [generator.randint(1, 100) for _ in range(100)]
    bins = [members for rank in plan_micro_batches(lengths, 100, ranks=3) for members in rank]
    assert len(bins) > len(plan_micro_batches(lengths, 100)[0])
    assert sorted(i for members in bins for i in members) == list(range(100))
    assert all(members and tokens(lengths, members) <= 100 for members in bins)


def test_the_balance_is_that_of_the_best_plan_where_it_can_be_searched():
    for lengths in combinations_with_replacement((1, 2, 5, 9), 5):
        plan = plan_micro_batches(lengths, 100, ranks=2)
        got = max(tokens(lengths, rank[0]) for rank in plan)
        best = min(
            max(sum(lengths[i] for i in range(5) if split >> i & 1 == side) for side in (0, 1))
            for split in range(32)
        )
        # Longest-first onto two ranks is at most 7/6 of the optimum (Graham 1969).
        assert got <= best * 7 / 6


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    assert plan_micro_batches([7], 10, ranks=3) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], 10, ranks=2) == [[], []]


def test_the_number_is_a_multiple_for_interleaved_pipelines():
    plan = plan_micro_batches([4] * 10, 8, ranks=2, multiple_of=4)
    assert [len(rank) for rank in plan] == [4, 4]


@pytest.mark.parametrize("name", ["max_tokens", "ranks", "multiple_of"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0: it must be at least 1"):
        plan_micro_batches([1], **{"max_tokens": 5, name: 0})

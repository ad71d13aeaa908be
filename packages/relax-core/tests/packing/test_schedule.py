import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_core.packing import plan_micro_batches


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 120))
def test_every_sample_once_and_only_a_lone_sample_may_exceed_the_budget(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(i for members in plan for i in members) == list(range(len(lengths)))
    for members in plan:
        assert members == sorted(members)
        assert len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens


def test_micro_batches_are_balanced():
    # First-fit alone would give 60 + 60 + 10; spreading gives 50 + 40 + 40.
    plan = plan_micro_batches([10] * 13, 60)
    assert sorted(len(members) for members in plan) == [4, 4, 5]


def test_a_sample_longer_than_the_budget_stands_alone():
    assert plan_micro_batches([5, 100, 5], 20) == [[0, 2], [1]]


def test_no_budget_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        plan_micro_batches([1], 0)

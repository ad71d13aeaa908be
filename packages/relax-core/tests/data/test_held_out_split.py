import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.data import DataError, Prompt
from relax_core.data.split import held_out_of


def _prompts(texts):
    return [Prompt(str(n), np.array([1], dtype=np.int32), text) for n, text in enumerate(texts)]


def _sides(texts, fraction, seed):
    prompts = _prompts(texts)
    apart = held_out_of(prompts, fraction, seed)
    pairs = list(zip(prompts, apart, strict=True))
    return [one for one, flag in pairs if not flag], [one for one, flag in pairs if flag]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=2, max_size=30).filter(lambda t: len(set(t)) > 2),
    st.floats(0.01, 0.5),
    st.integers(0, 5),
    st.randoms(),
)
def test_sides_are_disjoint_complete_and_independent_of_the_rows_order(texts, fraction, seed, random):
    train, held_out = _sides(texts, fraction, seed)
    assert not {e.prompt_text for e in train} & {e.prompt_text for e in held_out}
    assert sorted(int(e.id) for e in (*train, *held_out)) == list(range(len(texts)))
    assert len({e.prompt_text for e in held_out}) == max(1, round(fraction * len(set(texts))))
    shuffled = list(texts)
    random.shuffle(shuffled)
    _, again = _sides(shuffled, fraction, seed)
    assert {e.prompt_text for e in again} == {e.prompt_text for e in held_out}


def test_the_seed_chooses():
    chosen = {_sides("abcdefghij", 0.1, seed)[1][0].prompt_text for seed in range(20)}
    assert len(chosen) > 3


def test_a_fraction_of_zero_holds_nothing_out():
    train, held_out = _sides("aab", 0.0, 0)
    assert (len(train), len(held_out)) == (3, 0)


def test_something_must_be_left_to_train_on():
    with pytest.raises(DataError, match=r"eval_fraction 0.5 of 1 distinct prompts leaves none"):
        _sides("aaa", 0.5, 0)

"""Rewards by name."""

import pytest
from relax_rollout.rewards import RewardInput, load_reward


def test_built_in_rewards_by_name():
    assert load_reward("math").name == "math"
    assert load_reward("exact_match").worker is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("maths", "no reward is called 'maths'; give exact_match, math, or your own as module:function"),
        ("a:b:c", "no reward is called"),
        (":f", "no reward is called"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("my_rewards:no_such", "cannot be imported: AttributeError"),
        ("my_rewards:number", "is int; it must be a function"),
    ],
)
def test_unknown_rewards_are_refused_at_once(runner_of, spec, words):
    with pytest.raises(ValueError, match=words):
        load_reward(spec)


@pytest.mark.parametrize(
    ("text", "words"), [("def f(:\n", "SyntaxError: invalid syntax"), ("1 / 0\n", "ZeroDivisionError")]
)
def test_a_module_that_cannot_be_run_is_refused_with_its_error(tmp_path, monkeypatch, text, words):
    (tmp_path / "broken_reward.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"reward 'broken_reward:f' cannot be imported: {words}"):
        load_reward("broken_reward:f")


def test_coroutine_functions_are_told_from_plain_ones(runner_of):
    assert load_reward("my_rewards:waits").concurrent
    assert load_reward("my_rewards:judge").concurrent
    assert not load_reward("my_rewards:length").concurrent
    assert runner_of("my_rewards:judge").score_now([RewardInput("", "")])[0].score == 3.0


def test_a_function_itself_is_taken_if_it_can_be_imported(runner_of):
    import my_rewards

    assert load_reward(my_rewards.length).worker == "my_rewards:length"
    with pytest.raises(ValueError, match="cannot be imported by a worker process"):
        load_reward(lambda item: 1.0)

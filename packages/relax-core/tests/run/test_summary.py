import math

import pytest
from relax_core.run import installed_versions, summarize


def summary(records):
    return summarize(records, seed=3, wall_s=12.5, peak_rss_gib=1.0)


def record(step, **values):
    return {"step": step, **values}


def test_the_fields_are_those_of_a_run_worked_by_hand():
    records = [record(0, eval_accuracy=0.25, time={"phases": {"eval": 9.0}})]
    records += [
        record(
            step,
            reward=step / 20,
            train_tokens=100,
            rollout_tokens=40,
            logprob_gap_max=0.001 * (step == 7),
            time={
                "phases": {"rollout": 2.0, "train": 3.0, "logprob": 1.0},
                "peak_rss_gib": 1.0 + (step == 5),
                "update_exposed": 0.5 * (step % 2),
            },
        )
        for step in range(1, 21)
    ]
    records[-1]["eval_accuracy"] = 0.75
    found = summary(records)
    assert found.pop("versions") == installed_versions()
    assert found == {
        "eval_metric": "accuracy",
        "eval_before": 0.25,
        "eval_after": 0.75,
        "reward_first": pytest.approx((0.05 + 0.10) / 2),
        "reward_last": pytest.approx((0.95 + 1.0) / 2),
        "steps": 20,
        "wall_s": 12.5,
        "train_tokens_per_s": 25.0,
        "rollout_tokens_per_s": 20.0,
        "update_exposed_s": 0.25,
        "peak_rss_gib": 2.0,
        "logprob_gap_max": 0.001,
        "seed": 3,
    }


def test_a_run_of_few_steps_takes_one_step_as_its_tenth():
    found = summary([record(step, reward=float(step)) for step in (1, 2, 3)])
    assert (found["reward_first"], found["reward_last"]) == (1.0, 3.0)


def test_what_was_not_measured_is_none():
    found = summary([record(1, loss=1.0)])
    names = (
        "eval_before",
        "eval_after",
        "reward_first",
        "reward_last",
        "train_tokens_per_s",
        "update_exposed_s",
        "logprob_gap_max",
    )
    assert {found[name] for name in names} == {None}
    assert summary([])["steps"] == 0


def test_an_evaluation_in_the_middle_is_not_the_one_after():
    assert summary([record(1, eval_accuracy=0.5), record(2)])["eval_after"] is None


def test_without_right_and_wrong_the_held_out_reward_counts():
    found = summary([record(0, eval_reward=0.5, eval_loss=2.0), record(1)])
    assert (found["eval_metric"], found["eval_before"], found["eval_after"]) == ("reward", 0.5, None)


def test_supervised_runs_are_judged_by_their_held_out_loss():
    found = summary([record(0, eval_loss=2.0), record(1, eval_loss=1.0)])
    assert (found["eval_metric"], found["eval_before"], found["eval_after"]) == ("loss", 2.0, 1.0)


def test_a_gap_that_is_no_number_is_not_hidden():
    found = summary([record(1, logprob_gap_max=1.0), record(2, logprob_gap_max=math.nan)])
    assert math.isnan(found["logprob_gap_max"])


def test_versions_name_python_and_the_installed_packages():
    found = installed_versions()
    assert {"python", "relax-core", "torch", "megatron-core"} <= set(found)
    assert "sglang" not in found or found["sglang"]

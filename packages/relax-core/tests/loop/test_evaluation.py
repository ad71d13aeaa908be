"""Evaluation while training: what it measures, and that the training does not notice it."""

import itertools
import json

import numpy as np
import pytest
from relax_core.data import Prompt
from relax_core.data.arithmetic import write_arithmetic
from relax_core.loop import run
from relax_core.loop.evaluation import evaluation_metrics, pass_at_k
from relax_core.loop.groups import Group, Scored
from relax_core.loop.trajectory import Trajectory
from relax_core.run import RunDirectory
from relax_core.run.metrics import describe
from relax_rollout.rewards import RewardResult


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 4, 2), (6, 1, 3), (6, 2, 4), (7, 3, 1), (5, 3, 5)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_correct_one(n, c, k):
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_numbers_are_refused(n, c, k):
    with pytest.raises(ValueError, match="k must be from 1 to the number of samples"):
        pass_at_k(n, c, k)


def group(*correct):
    prompt = Prompt("p", np.array([1], dtype=np.int32), "p")
    one = Trajectory((1,), (0.0,), (0,), (True,), "stop")
    return Group(prompt, tuple(Scored(one, "", RewardResult(float(c is True), correct=c)) for c in correct))


def test_metrics_of_a_set():
    groups = [group(True, False, False, False), group(False, False, False, False)]
    found = evaluation_metrics(groups, (1, 2))
    assert found == {"reward": 1 / 8, "accuracy": 1 / 8, "pass_at_1": 1 / 8, "pass_at_2": 1 / 4}
    assert evaluation_metrics([group(None, None)], (1,)) == {"reward": 0.0}


def start(config, path):
    with RunDirectory.create(path, config) as directory:
        assert run(config, directory, resume=False) == "finished"
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    weights = {file.name: file.read_bytes() for file in directory.hf.glob("*.safetensors")}
    return lines, directory.samples.read_bytes(), weights


def test_the_bytes_of_a_run_are_the_same_with_and_without_evaluation(small_run, tmp_path):
    _, other = write_arithmetic(tmp_path / "other", 5, train_rows=4, held_out_rows=5)
    never = {"before": False, "after": False}
    plain = start(small_run(eval=never, run={"steps": 3}), tmp_path / "plain")
    often = {
        "every": 1,
        "sets": {"other": str(other)},
        "samples_per_prompt": 4,
        "pass_at": [1, 4],
        "temperature": 1.0,
    }
    watched = start(small_run(eval=often, run={"steps": 3}, reward={"function": "math"}), tmp_path / "math")
    assert {"eval_pass_at_1", "eval_pass_at_4", "eval_other_pass_at_4", "eval_other_accuracy"} <= watched[0][
        1
    ].keys()
    watched = start(small_run(eval=often, run={"steps": 3}), tmp_path / "watched")
    assert watched[1:] == plain[1:]
    for before, after in zip(plain[0], watched[0][1:], strict=True):
        trained = {k: v for k, v in after.items() if not k.startswith("eval_") and k != "time"}
        assert trained == {k: v for k, v in before.items() if k != "time"}
        assert {"eval_reward", "eval_other_reward"} <= after.keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pass_at": [4]}, "set samples_per_prompt to at least the largest k"),
        ({"pass_at": [2], "samples_per_prompt": 2}, "set eval.temperature above 0"),
        ({"sets": {"My Set": "x.jsonl"}}, "they become names of metrics"),
    ],
)
def test_settings_that_cannot_be_are_refused(small_run, settings, words):
    with pytest.raises(ValueError, match=words):
        small_run(eval=settings)


def test_metrics_of_sets_have_names_for_people():
    assert describe("eval_gsm8k_accuracy").label == "held out, gsm8k"
    assert describe("eval_gsm8k_accuracy").group == "accuracy"
    assert describe("eval_pass_at_8").group == describe("eval_a_b_pass_at_8").group == "pass@k"
    assert describe("eval_accuracy").doc.startswith("Share of held-out")

"""Whole runs on a CPU: completions of several turns, and partial rollouts."""

import json
import math
import os

import pytest
from relax_core.loop import run
from relax_core.run import RunDirectory


def start(config, path):
    with RunDirectory.create(path, config) as directory:
        assert run(config, directory, resume=False) == "finished"
    steps = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    samples = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    return steps, samples


@pytest.fixture
def guessing_game(tmp_path, monkeypatch):
    """Tells the model to guess again until its second turn."""
    (tmp_path / "guessing.py").write_text(
        "from relax_core.loop.environments.protocol import Reply\n"
        "class Game:\n"
        "    def __init__(self, prompt):\n"
        "        self.turns = 0\n"
        "    async def reply(self, turn):\n"
        "        self.turns += 1\n"
        "        again = () if self.turns == 2 else ({'role': 'user', 'content': 'guess again'},)\n"
        "        return Reply(again, {'turns': self.turns})\n"
        "def reward(item):\n"
        "    return item.metadata['turns'] + len(item.completion) / 10\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "guessing"


def test_turns_of_a_real_model_are_trained_on_the_very_tokens_that_it_drew(
    small_run, tmp_path, guessing_game
):
    config = small_run(
        run={"steps": 2},
        environment={"name": f"{guessing_game}:Game", "turn_tokens": 3, "reply_tokens": 20},
        rollout={"max_new_tokens": 8},
        reward={"function": f"{guessing_game}:reward"},
    )
    steps, samples = start(config, tmp_path / "game")
    for step in steps[1:]:
        assert step["turns_mean"] == 2
        assert step["reply_tokens_mean"] > 5
        assert 2 < step["reward"] < 3
        # Trainer and engine agree on every token drawn only if both saw the same tokens before it.
        assert step["logprob_gap_max"] < 1e-5
        assert step["loss"] != 0
    assert all(sample["tokens"] <= 6 and sample["turns"] == 2 for sample in samples)
    assert "guess again" in samples[0]["completion"]


def test_the_worked_example_of_the_readme_runs(small_run, tmp_path):
    config = small_run(
        run={"steps": 1},
        environment={"name": "tools", "tools": ["relax_core.loop.environments.calculator:calculator"]},
    )
    steps, samples = start(config, tmp_path / "calculator")
    assert steps[1]["turns_mean"] >= 1
    assert len(samples) == 16


def test_partial_rollouts_train_the_model(small_run, tmp_path):
    config = small_run(
        run={"steps": 4},
        rollout={"over_sampling": 1.5, "early_abort": "continue", "max_new_tokens": 12},
        eval={"before": False, "after": False},
    )
    steps, samples = start(config, tmp_path / "partial")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert len(samples) == 4 * 16
    assert len({(sample["step"], sample["prompt"]) for sample in samples}) == 16
    assert all(math.isfinite(value) for step in steps for name, value in step.items() if name != "time")
    # At most the two versions that rollout.partial_versions allows, and a step to train them in.
    assert all(step["staleness_max"] <= 3 for step in steps)

"""Every algorithm, from the command to the exported model, on the quickstart."""

import json
import math
from pathlib import Path

import pytest
from relax_core.algorithms import algorithm_names, get_algorithm
from relax_core.cli.train import main

SMALL = {
    "run.steps": "2", "run.name": "tiny", "run.progress": "none", "run.threads": "1",
    "rollout.prompts_per_step": "4", "rollout.samples_per_prompt": "4", "rollout.max_new_tokens": "4",
    "eval.before": "false", "eval.after": "false", "eval.every": "0", "checkpoint.every": "0",
    "trainer.warmup_steps": "0", "reward.concurrency": "1",
}  # fmt: skip
MORE = {
    "dapo": {"rollout.dynamic_sampling": "true", "reward.overlong_tokens": "2"},
    "reinforce_plus_plus": {"algorithm.kl_reward_coef": "0.01", "trainer.optimizer_steps_per_batch": "2"},
    "gspo": {"trainer.optimizer_steps_per_batch": "2"},
}
RL = [name for name in algorithm_names() if get_algorithm(name).loop == "rl"]


def run(name, **more):
    """Metrics of each step of `relax-train --algorithm.name NAME` in the present directory."""
    settings = {**SMALL, "algorithm.name": name, **MORE.get(name, {}), **more}
    arguments = [word for key, value in settings.items() for word in (f"--{key}", value)]
    assert main(arguments) == 0
    return [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RL)
def test_two_steps_of_the_quickstart(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = run(name)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for key, value in step.items() if key != "time")
    assert any(step["grad_norm"] > 0 for step in steps)
    assert (tmp_path / "runs/tiny/hf/model.safetensors").exists()

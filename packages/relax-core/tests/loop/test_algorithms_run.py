"""Every algorithm, from the command to the exported model, on the quickstart."""

import math

import pytest
from relax_core.algorithms import algorithm_names, get_algorithm

MORE = {
    "dapo": {
        "rollout.dynamic_sampling": "true",
        "reward.overlong_tokens": "2",
        "algorithm.mask_truncated": "true",
    },
    "reinforce_plus_plus": {"algorithm.kl_reward_coef": "0.01", "trainer.optimizer_steps_per_batch": "2"},
    "gspo": {"trainer.optimizer_steps_per_batch": "2"},
    "on_policy_distillation": {"teacher.path": "builtin:quickstart/model"},
    "m2po": {"trainer.optimizer_steps_per_batch": "2"},
}
RL = [name for name in algorithm_names() if get_algorithm(name).loop == "rl"]


@pytest.mark.parametrize("name", RL)
def test_two_steps_of_the_quickstart(name, run_quickstart, tmp_path):
    steps = run_quickstart(name, **MORE.get(name, {}))
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for key, value in step.items() if key != "time")
    assert any(step["grad_norm"] > 0 for step in steps)
    assert (tmp_path / "runs/tiny/hf/model.safetensors").exists()

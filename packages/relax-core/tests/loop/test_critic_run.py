"""PPO from the config to the checkpoints."""

import pytest
import torch
from relax_core.config import load_config
from relax_core.loop import run
from relax_core.run import RunDirectory
from relax_core.testing.runs import records, start, weights

PPO = {
    "algorithm": {"name": "ppo", "gae_lambda": 0.95, "kl_reward_coef": 0.01},
    "critic": {"lr": 1e-2},
    "trainer": {"lr": 1e-3, "precision": "fp32", "optimizer_steps_per_batch": 2},
}


def test_the_critic_learns_beside_the_policy_and_resumes_exactly(small_run, tmp_path):
    config = small_run(**PPO)
    through = start(config, tmp_path / "through")
    steps = records(through)[1:]
    # The first values are 0 and the reward is above: the critic moves towards it.
    assert 0 < steps[1]["value"] < steps[-1]["value"]
    assert all(step["critic_lr"] == 1e-2 and step["lr"] == 1e-3 for step in steps)
    assert all(step["critic_grad_norm"] > 0 for step in steps)
    folders = sorted(path.name for path in (through.checkpoints / "critic").iterdir())
    assert folders == ["step_2", "step_4"]
    half = tmp_path / "half"
    with RunDirectory.create(half, config) as directory:
        short = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
        run(short, directory, resume=False)
    with RunDirectory.resume(half) as directory:
        directory.reopen(config)
        assert run(config, directory, resume=True) == "finished"
    assert records(directory)[3:] == records(through)[3:]
    first, second = weights(through.hf), weights(directory.hf)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_in_the_warm_up_only_the_critic_learns(small_run, small_model, tmp_path):
    sections = {**PPO, "critic": {"lr": 1e-2, "warmup_steps": 3}, "checkpoint": {"every": 0}}
    directory = start(small_run(**sections), tmp_path / "warm")
    steps = records(directory)[1:]
    assert ["policy_loss" in step for step in steps] == [False, False, False, True]
    assert all("value_loss" in step for step in steps)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"critic.lr": "1e-4"}, "algorithm grpo has no critic"),
        ({"algorithm.name": "ppo", "critic.warmup_steps": "40"}, "would not learn in any of the 40 steps"),
        ({"algorithm.gae_lambda": "0.9"}, "gae_lambda 0.9 has no effect with algorithm 'grpo'"),
        ({"algorithm.name": "rloo", "trainer.optimizer_steps_per_batch": "2"}, "has no policy ratio"),
        ({"algorithm.name": "dapo"}, "drops groups whose rewards are all equal"),
        ({"reward.overlong_tokens": "7"}, "completions are cut at 6 tokens"),
        ({"reward.overlong_penalty": "0.5"}, "has no effect while overlong_tokens is 0"),
    ],
)
def test_what_does_not_fit_an_algorithm_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        load_config("quickstart", [word for name, value in flags.items() for word in (f"--{name}", value)])

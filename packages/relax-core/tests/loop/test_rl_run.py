import json
import math

import pytest
import torch
from relax_bridge import Checkpoint
from relax_core.loop import run
from relax_core.run import RunDirectory
from relax_core.testing.runs import records, start, weights
from transformers import AutoModelForCausalLM


@pytest.fixture
def finished(small_run, tmp_path):
    return start(small_run(), tmp_path / "finished")


def test_a_run_leaves_metrics_samples_checkpoints_and_a_model(finished):
    steps = records(finished)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert {"reward", "entropy", "mtp_loss", "mtp_acceptance", "grad_norm", "logprob_gap_max"} <= steps[
        1
    ].keys()
    # Same weights, same precision: the engine's log-probs are the trainer's to float32 round-off.
    assert all(step["logprob_gap_max"] < 1e-5 for step in steps[1:])
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == ["step_2", "step_4"]
    assert len(finished.samples.read_text().splitlines()) == 4 * 16
    summary = json.loads(finished.summary.read_text())
    assert summary["steps"] == 4
    assert summary["reward_first"] == steps[1]["reward"]


def test_the_same_seed_gives_the_same_metrics_and_weights(finished, small_run, tmp_path):
    again = start(small_run(), tmp_path / "again")
    assert records(again) == records(finished)
    other = start(small_run(run={"seed": 4}), tmp_path / "other")
    assert records(other) != records(finished)
    first, second = weights(finished.hf), weights(again.hf)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_equals_the_uninterrupted_one(finished, small_run, tmp_path):
    config = small_run(run={"name": "half"})
    half = tmp_path / "half"
    with RunDirectory.create(half, config) as directory:
        short = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
        run(short, directory, resume=False)
    with RunDirectory.resume(half) as directory:
        directory.reopen(config)
        assert run(config, directory, resume=True) == "finished"
    assert records(directory)[3:] == records(finished)[3:]
    first, second = weights(finished.hf), weights(directory.hf)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_exported_model_loads_in_transformers_and_gives_the_same_greedy_tokens(finished, small_model):
    trained = AutoModelForCausalLM.from_pretrained(finished.hf)
    before = AutoModelForCausalLM.from_pretrained(small_model)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)
    names = set(Checkpoint.open(finished.hf).names)
    assert names == set(Checkpoint.open(small_model).names)
    assert any(name.startswith("mtp.") for name in names)


VARIANTS = {
    "two optimizer steps with KL and entropy": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"kl_loss_coef": 0.1, "entropy_coef": 0.01},
    },
    "Dr. GRPO with the KL in the reward, IcePop": {
        "algorithm": {"name": "dr_grpo", "kl_reward_coef": 0.1, "correction": "icepop"},
    },
    "group means with dynamic sampling": {
        "algorithm": {"reduction": "group_mean"},
        "rollout": {"dynamic_sampling": True, "over_sampling": 1.5},
    },
    "recompute, small micro-batches, no draft loss": {
        "trainer": {"recompute": "full", "micro_batch_tokens": 40},
        "mtp": {"loss_coefficient": 0},
    },
}


@pytest.mark.parametrize("sections", VARIANTS.values(), ids=VARIANTS)
def test_variants_run(small_run, tmp_path, sections):
    steps = records(start(small_run(**sections, run={"steps": 2}), tmp_path / "variant"))
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(step["logprob_gap_max"] < 1e-4 for step in steps[1:])


def test_micro_batches_do_not_change_the_numbers(finished, small_run, tmp_path):
    small = records(start(small_run(trainer={"micro_batch_tokens": 30}), tmp_path / "small"))
    for one, other in zip(records(finished)[:3], small[:3], strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-5)


def test_a_log_prob_gap_above_the_bound_stops_the_run(small_run, tmp_path):
    config = small_run(rollout={"max_logprob_gap": 1e-12})
    with (
        RunDirectory.create(tmp_path / "gap", config) as directory,
        pytest.raises(ValueError, match=r"rollout.max_logprob_gap = 1e-12"),
    ):
        run(config, directory, resume=False)

"""Trainer against engine: the bounds, and that the gap of weights that stay is the same in every step."""

import json

import pytest
from relax_core.loop import run
from relax_core.loop.config import RolloutConfig
from relax_core.loop.gap import LogProbGapError, check_gap
from relax_core.run import RunDirectory

METRICS = {"logprob_gap_mean": 0.2, "logprob_gap_max": 3.0, "rollout_kl": 0.04}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"max_logprob_gap": 0.1}, r"step 7: .* 0\.2 nats on average, above rollout\.max_logprob_gap = 0\.1"),
        ({"max_logprob_gap_of_token": 2.9}, r"3 nats at one token, above rollout\.max_logprob_gap_of_token"),
        ({"max_rollout_kl": 0.03}, r"0\.04 nats from the trainer's, above rollout\.max_rollout_kl = 0\.03"),
    ],
)
def test_a_bound_stops_the_run(bound, words):
    with pytest.raises(LogProbGapError, match=words):
        check_gap(7, METRICS, RolloutConfig(**bound))
    check_gap(7, METRICS, RolloutConfig(**{name: 2 * value for name, value in bound.items()}))
    with pytest.raises(LogProbGapError, match="nan nats"):
        check_gap(7, dict.fromkeys(METRICS, float("nan")), RolloutConfig(**bound))


def test_at_learning_rate_0_the_gap_stays_flat(small_run, tmp_path):
    """In bfloat16, where trainer and engine do differ; an engine left behind, or one that drifts, would not
    stay."""
    config = small_run(
        trainer={"lr": 0.0, "weight_decay": 0.0, "precision": "bf16"},
        run={"steps": 6},
        rollout={"max_new_tokens": 16},
        eval={"before": False, "after": False},
    )
    with RunDirectory.create(tmp_path / "flat", config) as directory:
        assert run(config, directory, resume=False) == "finished"
    steps = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    means = [step["logprob_gap_mean"] for step in steps]
    assert all(0 < mean < 0.05 for mean in means)
    # 256 tokens a step: other prompts, the same weights. The mean moves by its own scatter and has no trend.
    assert max(means) < 2 * min(means)
    assert abs(sum(means[3:]) / sum(means[:3]) - 1) < 0.3
    assert all(step["rollout_kl"] < 0.01 for step in steps)
    assert all(step["logprob_gap_max"] >= step["logprob_gap_mean"] for step in steps)

"""Scored completions as samples."""

from types import SimpleNamespace

import pytest
from relax_core.loop.groups import Group, Scored, group_samples, rollout_metrics
from relax_core.loop.trajectory import Trajectory
from relax_rollout.rewards import RewardResult


def group(*reasons):
    prompt = SimpleNamespace(prompt_ids=(7, 8), pictures=())
    members = [
        Scored(Trajectory((1, 2), (-0.5, -0.25), (0, 0), (True, True), reason), "", RewardResult(score))
        for score, reason in enumerate(reasons)
    ]
    return Group(prompt, tuple(members))


@pytest.mark.parametrize("masked", [False, True])
def test_completions_that_were_cut_carry_no_loss_if_so_set(masked):
    given = [group("stop", "length", "abort")]
    samples = group_samples(given, mask_truncated=masked)
    targets = [0, 0, 1, 1]
    cut = [0] * 4 if masked else targets
    assert [sample.mask_L.tolist() for sample in samples] == [targets, cut, cut]
    assert samples[1].columns["rollout_logprob"].tolist() == [0, 0, -0.5, -0.25]
    assert rollout_metrics(given)["truncated_fraction"] == pytest.approx(2 / 3)

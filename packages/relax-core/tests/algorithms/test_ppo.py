"""PPO's advantages and value loss by hand. Axes: T tokens."""

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, Completions
from relax_core.algorithms.builtin.ppo import value_loss


def done():
    """Two completions: two tokens with score 1, one with score 3; a KL (k1) of 0.5 at the first token."""
    columns = {
        "value": torch.tensor([0.5, 0.25, 1.0]).double(),
        "old_logprob": torch.tensor([-1.0, -1.0, -1.0]).double(),
        "ref_logprob": torch.tensor([-1.5, -1.0, -1.0]).double(),
    }
    return Completions(
        torch.tensor([1.0, 3.0]).double(), torch.tensor([0, 1]), torch.tensor([0, 0, 1]), columns
    )


def test_advantages_and_targets_by_hand():
    cfg = AlgorithmConfig(
        name="ppo", gae_gamma=0.5, gae_lambda=0.5, whiten_advantages=False, kl_reward_coef=0.1
    )
    # Rewards -0.05, 1, 3; deltas -0.05 + 0.125 - 0.5 = -0.425, 1 - 0.25 = 0.75, 3 - 1 = 2.
    advantages = [-0.425 + 0.25 * 0.75, 0.75, 2.0]
    assert cfg.algorithm.advantage(done(), cfg).tolist() == pytest.approx(advantages, rel=1e-12)
    targets = [advantages[0] + 0.5, 1.0, 3.0]
    assert cfg.algorithm.value_target(done(), cfg).tolist() == pytest.approx(targets, rel=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1_and_the_targets_stay():
    cfg, plain = AlgorithmConfig(name="ppo"), AlgorithmConfig(name="ppo", whiten_advantages=False)
    advantage_T = cfg.algorithm.advantage(done(), cfg)
    assert advantage_T.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantage_T.var().item() == pytest.approx(1, rel=1e-6)
    targets = [c.algorithm.value_target(done(), c).tolist() for c in (cfg, plain)]
    assert targets[0] == targets[1] == [1.0, 1.0, 3.0]


def test_the_value_loss_by_hand():
    # Old values 0, targets 1; values 0.5, 2, -1 with clip 0.2 count as 0.2, 0.2, -0.2 where that is worse.
    value_T = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    found = value_loss(value_T, torch.zeros(3).double(), torch.ones(3).double(), clip=0.2)
    assert found.loss_T.tolist() == pytest.approx([0.32, 0.5, 2.0])
    assert found.clipped_T.tolist() == [True, False, False]
    found.loss_T.sum().backward()
    assert value_T.grad.tolist() == pytest.approx([0.0, 1.0, -2.0])


def test_without_a_clip_it_is_half_the_squared_error():
    found = value_loss(torch.tensor([3.0]), torch.zeros(1), torch.ones(1), clip=None)
    assert found.loss_T.tolist() == [2.0]
    assert found.clipped_T.tolist() == [False]


def test_rounding_does_not_count_as_clipping():
    generator = torch.Generator().manual_seed(0)
    old_T = torch.randn(1000, generator=generator)
    value_T = 0.1 * torch.randn(1000, generator=generator)
    found = value_loss(value_T, old_T, torch.randn(1000, generator=generator), clip=10.0)
    assert not found.clipped_T.any()

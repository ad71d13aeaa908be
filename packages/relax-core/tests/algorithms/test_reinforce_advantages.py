"""Advantages of RLOO and REINFORCE++ by hand, token by token."""

import statistics

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, Completions

SEQUENCE_T = torch.tensor([0, 0, 0, 1, 1])


def advantages(name, score, group, **settings):
    columns = {
        "old_logprob": torch.tensor([-1.0, -2.0, -1.0, -3.0, -1.0]).double(),
        "ref_logprob": torch.tensor([-1.5, -2.0, -3.0, -2.0, -1.0]).double(),
    }
    done = Completions(torch.tensor(score).double(), torch.tensor(group), SEQUENCE_T, columns)
    cfg = AlgorithmConfig(name=name, **settings)
    return cfg.algorithm.advantage(done, cfg).tolist()


def whiten(values):
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / std for value in values]


def test_rloo():
    assert advantages("rloo", [1.0, 3.0], [0, 0]) == pytest.approx([-2.0] * 3 + [2.0] * 2)


def test_reinforce_plus_plus_counts_the_kl_from_each_token_on():
    # k1 is 0.5, 0, 2 and -1, 0; what follows sums to 2.5, 2, 2 and -1, 0.
    returns = [1 - 0.25, 1 - 0.2, 1 - 0.2, 2 + 0.1, 2.0]
    found = advantages("reinforce_plus_plus", [1.0, 2.0], [0, 1], kl_reward_coef=0.1)
    assert found == pytest.approx(whiten(returns), rel=1e-6)


def test_reinforce_plus_plus_with_a_baseline_whitens_over_tokens():
    # Centred: -1 at three tokens, 1 at two.
    found = advantages("reinforce_plus_plus_baseline", [1.0, 3.0], [0, 0])
    assert found == pytest.approx(whiten([-1, -1, -1, 1, 1]), rel=1e-6)


def test_a_batch_without_spread_teaches_nothing():
    assert advantages("reinforce_plus_plus_baseline", [2.0, 2.0], [0, 0]) == [0.0] * 5
    assert advantages("reinforce_plus_plus", [2.0, 2.0], [0, 1]) == [0.0] * 5

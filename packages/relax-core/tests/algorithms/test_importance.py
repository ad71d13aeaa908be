"""Axes: T tokens."""

import math

import pytest
import torch
from relax_core.algorithms import Sequences, importance_weight
from relax_core.algorithms.importance import correction_log_ratio

# Trainer over rollout probability: 0.25, 0.5, 1, 2, 5, 6
RATIO_T = torch.tensor([0.25, 0.5, 1.0, 2.0, 5.0, 6.0], dtype=torch.float64)
ROLLOUT_T = torch.full((6,), math.log(0.05), dtype=torch.float64)
TRAINER_T = ROLLOUT_T + RATIO_T.log()


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", 0.0, math.inf, [1, 1, 1, 1, 1, 1]),
        ("truncated", 0.0, 3.0, [0.25, 0.5, 1, 2, 3, 3]),
        ("icepop", 0.4, 5.5, [0, 0.5, 1, 2, 5, 0]),
    ],
)
def test_weights_by_hand(kind, low, high, expected):
    weight_T = importance_weight(kind, TRAINER_T - ROLLOUT_T, low=low, high=high)
    assert weight_T.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["none", "truncated", "icepop"])
def test_the_weight_has_no_gradient(kind, level):
    sequences = Sequences(torch.zeros(6, dtype=torch.int64), 1)
    log_ratio_T = correction_log_ratio(level, TRAINER_T.clone().requires_grad_(), ROLLOUT_T, sequences)
    weight_T = importance_weight(kind, log_ratio_T, low=0.5, high=5.0)
    assert not weight_T.requires_grad


def test_a_gap_too_large_for_exp_stays_finite():
    weight_T = importance_weight("truncated", torch.tensor([1e4]), low=0.0, high=2.0)
    assert weight_T.tolist() == [2.0]
    assert importance_weight("icepop", torch.tensor([1e4]), low=0.5, high=5.0).item() == 0

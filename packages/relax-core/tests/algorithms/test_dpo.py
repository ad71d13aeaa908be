"""DPO's loss by hand. Axes: P pairs."""

import math

import pytest
import torch
import torch.nn.functional as F
from relax_core.algorithms.builtin.dpo import preference_loss


def test_a_pair_by_hand():
    # margin 0.5 x (2 - 1) = 0.5: loss log(1 + e^-0.5), slope -0.5 / (1 + e^0.5).
    found = preference_loss(torch.tensor([2.0]).double(), torch.tensor([1.0]).double(), beta=0.5)
    assert found.margin_P.item() == 0.5
    assert found.loss_P.item() == pytest.approx(math.log(1 + math.exp(-0.5)), rel=1e-14)
    assert found.slope_P.item() == pytest.approx(-0.5 / (1 + math.exp(0.5)), rel=1e-14)


def test_the_slope_is_the_derivative():
    chosen_P = torch.tensor([3.0, -2.0, 0.0, 800.0, -800.0], dtype=torch.float64, requires_grad=True)
    rejected_P = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    (-F.logsigmoid(0.3 * (chosen_P - rejected_P))).sum().backward()
    found = preference_loss(chosen_P.detach(), rejected_P.detach(), beta=0.3)
    torch.testing.assert_close(found.slope_P, chosen_P.grad)
    torch.testing.assert_close(-found.slope_P, rejected_P.grad)
    assert found.loss_P.isfinite().all()

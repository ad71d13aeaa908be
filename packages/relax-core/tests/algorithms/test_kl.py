"""Axes: T tokens, V vocabulary."""

import math

import pytest
import torch
from relax_core.algorithms import kl_estimate

# Policy 0.5, reference 0.25: d = ln 2 = 0.6931472.
P_T, R_T = torch.tensor([[0.5], [0.25]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("k1", 0.6931472, -0.6931472),
        ("k2", 0.2402265, 0.2402265),
        ("k3", 0.1931472, 0.3068528),  # 1/2 - 1 + ln 2, and 2 - 1 - ln 2
        ("low_var", 0.1931472, 0.3068528),
    ],
)
def test_values_by_hand(kind, forward, backward):
    assert kl_estimate(kind, P_T, R_T).item() == pytest.approx(forward, abs=1e-7)
    assert kl_estimate(kind, R_T, P_T).item() == pytest.approx(backward, abs=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_true_kl(kind):
    p_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    true = sum(p * math.log(p / q) for p, q in zip(p_V.tolist(), q_V.tolist(), strict=True))
    assert (p_V * kl_estimate(kind, p_V.log(), q_V.log())).sum().item() == pytest.approx(true, rel=1e-12)


def test_gradients_by_hand():
    # d/dlogp: k1 1; k2 d; k3 1 - exp(-d)
    for kind, expected in [("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5), ("low_var", 0.5)]:
        logprob_T = P_T.clone().requires_grad_()
        kl_estimate(kind, logprob_T, R_T).sum().backward()
        assert logprob_T.grad.item() == pytest.approx(expected, rel=1e-12)


def test_low_var_stops_at_ten_where_k3_goes_on():
    policy_T, ref_T = torch.tensor([-10.0, -1.0, -300.0]), torch.tensor([-1.0, -40.0, 0.0])
    # exp(9) - 1 - 9 = 8093.08; exp(-20) - 1 + 39 = 38 (the exponent stops at -20); exp(20) - 1 - 300
    k3_T = kl_estimate("k3", policy_T, ref_T)
    torch.testing.assert_close(k3_T, torch.tensor([8093.084, 38.0, 485164894.4]), rtol=1e-6, atol=0)
    assert kl_estimate("low_var", policy_T, ref_T).tolist() == [10.0, 10.0, 10.0]


def test_k3_keeps_its_digits_when_policy_and_reference_almost_agree():
    # d = 2^-13, exact in float32 next to 1: k3 = d^2 / 2 - d^3 / 6 = 7.4503e-9; exp(-d) - 1 + d would give 0.
    d = 2.0**-13
    k3 = kl_estimate("k3", torch.tensor([-1.0 + d]), torch.tensor([-1.0])).item()
    assert k3 == pytest.approx(d * d / 2 - d**3 / 6, rel=2e-3)

"""Axes: T tokens."""

import math

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, Sequences, policy_objective, sft_objective

LN2 = math.log(2)
NAN = float("nan")


def _inputs(**changes):
    """Three tokens: ratio 2 with A 1; ratio 1 with A -1; one outside of the mask, full of NaN."""
    inputs = {
        "logprob_T": torch.tensor([-1.0, -2.0, NAN]).double().requires_grad_(),
        "old_logprob_T": torch.tensor([-1.0 - LN2, -2.0, NAN]).double(),
        "rollout_logprob_T": torch.tensor([-1.0 - LN2, -2.0 - 3 * LN2, NAN]).double(),
        "ref_logprob_T": torch.tensor([-1.0 - LN2, -2.0, NAN]).double(),
        "advantage_T": torch.tensor([1.0, -1.0, NAN]).double(),
        "entropy_T": torch.tensor([0.5, 0.25, NAN]).double().requires_grad_(),
        "mask_T": torch.tensor([True, True, False]),
    }
    return {**inputs, **changes}


def test_every_term_and_diagnostic_by_hand():
    cfg = AlgorithmConfig(
        clip_low=0.2, clip_high=0.3, kl="k3", kl_loss_coef=0.1, entropy_coef=0.01, correction="truncated"
    )
    objective = policy_objective(cfg, **_inputs())
    # The second token's trainer probability is 8 times the rollout's: weight 2 at the cap.
    assert objective.terms["policy"].value_T.tolist() == pytest.approx([-1.3, 2.0, 0.0])
    assert objective.terms["kl"].value_T.tolist() == pytest.approx([0.5 - 1 + LN2, 0.0, 0.0])
    assert objective.terms["entropy"].value_T.tolist() == [0.5, 0.25, 0.0]
    assert {k: t.coefficient for k, t in objective.terms.items()} == {
        "policy": 1.0,
        "kl": 0.1,
        "entropy": -0.01,
    }
    found = {name: value.tolist() for name, value in objective.diagnostics.items()}
    assert found == {
        "ratio": pytest.approx([2.0, 1.0, 0.0]),
        "clip_fraction": [1.0, 0.0, 0.0],
        "dual_clip_fraction": [0.0, 0.0, 0.0],
        "policy_kl": pytest.approx([2.0 - 1 - LN2, 0.0, 0.0]),
        "importance_weight": [pytest.approx(1.0), 2.0, 0.0],
        "logprob_gap": pytest.approx([0.0, 3 * LN2, 0.0]),
        "rollout_kl": pytest.approx([0.0, 8 - 1 - 3 * LN2, 0.0]),
        "correction_fraction": [0.0, 1.0, 0.0],
        "kl": pytest.approx([0.5 - 1 + LN2, 0.0, 0.0]),
        "entropy": [0.5, 0.25, 0.0],
    }
    assert not any(value.requires_grad for value in objective.diagnostics.values())


def test_gradients_by_hand_and_none_outside_of_the_mask():
    inputs = _inputs()
    cfg = AlgorithmConfig(clip_high=1.5, kl="k2", kl_loss_coef=0.1, entropy_coef=0.01)
    objective = policy_objective(cfg, **inputs)
    sum(term.coefficient * term.value_T.sum() for term in objective.terms.values()).backward()
    # policy: -w r A = -2 and 2 x 1; k2: d = ln 2 and 0
    assert inputs["logprob_T"].grad.tolist() == pytest.approx([-2.0 + 0.1 * LN2, 2.0, 0.0])
    assert inputs["entropy_T"].grad.tolist() == pytest.approx([-0.01, -0.01, 0.0])


def test_icepop_drops_a_token_from_the_policy_loss_but_not_from_the_kl():
    inputs = _inputs(ref_logprob_T=torch.tensor([-1.0, -3.0, NAN]).double())
    objective = policy_objective(AlgorithmConfig(correction="icepop", kl="k2", kl_loss_coef=1.0), **inputs)
    assert objective.terms["policy"].value_T[1].item() == 0.0
    assert objective.terms["kl"].value_T[1].item() == 0.5
    assert objective.diagnostics["importance_weight"].tolist() == [pytest.approx(1.0), 0.0, 0.0]


@pytest.mark.parametrize(
    ("correction", "level", "weights"),
    [
        # Trainer over engine: 2 and 8 in the first completion, 1 in the second.
        ("truncated", "token", [2.0, 3.0, 1.0]),
        ("truncated", "sequence", [3.0, 3.0, 1.0]),
        ("truncated", "geometric", [3.0, 3.0, 1.0]),
        ("icepop", "token", [2.0, 0.0, 1.0]),
        ("icepop", "sequence", [0.0, 0.0, 1.0]),
        ("icepop", "geometric", [4.0, 4.0, 1.0]),
    ],
)
def test_the_correction_compares_tokens_or_whole_completions(correction, level, weights):
    zero_T = torch.zeros(3, dtype=torch.float64)
    high = 3.0 if correction == "truncated" else 5.0
    cfg = AlgorithmConfig(correction=correction, correction_level=level, correction_high=high)
    objective = policy_objective(
        cfg,
        logprob_T=zero_T.clone().requires_grad_(),
        old_logprob_T=zero_T,
        rollout_logprob_T=torch.tensor([-LN2, -3 * LN2, 0.0]).double(),
        ref_logprob_T=None,
        advantage_T=torch.ones(3).double(),
        entropy_T=None,
        mask_T=torch.ones(3),
        sequences=Sequences(torch.tensor([0, 0, 1]), 2),
    )
    assert objective.diagnostics["importance_weight"].tolist() == pytest.approx(weights)
    capped = [float(w in (0.0, 3.0)) for w in weights]
    assert objective.diagnostics["correction_fraction"].tolist() == capped
    assert objective.terms["policy"].value_T.tolist() == pytest.approx([-w for w in weights])


def test_dual_clip_reaches_the_policy_term():
    inputs = _inputs(advantage_T=torch.tensor([-1.0, -1.0, NAN]).double())
    objective = policy_objective(AlgorithmConfig(correction="none", dual_clip=1.5), **inputs)
    assert objective.terms["policy"].value_T.tolist() == [1.5, 1.0, 0.0]
    assert objective.diagnostics["dual_clip_fraction"].tolist() == [1.0, 0.0, 0.0]


def test_without_a_coefficient_kl_and_entropy_are_metrics_only():
    terms = policy_objective(AlgorithmConfig(), **_inputs()).terms
    assert terms["kl"].coefficient == 0
    assert terms["entropy"].coefficient == 0


def test_without_reference_entropy_and_rollout_their_terms_are_absent():
    inputs = _inputs(rollout_logprob_T=None, ref_logprob_T=None, entropy_T=None)
    objective = policy_objective(AlgorithmConfig(correction="none"), **inputs)
    assert set(objective.terms) == {"policy"}
    assert set(objective.diagnostics) == {
        "ratio",
        "clip_fraction",
        "dual_clip_fraction",
        "policy_kl",
        "importance_weight",
    }


def test_a_ratio_beyond_float32_stays_finite():
    one_T = torch.tensor([0.0])
    objective = policy_objective(
        AlgorithmConfig(correction="none"),
        logprob_T=one_T,
        old_logprob_T=torch.tensor([-500.0]),
        rollout_logprob_T=None,
        ref_logprob_T=None,
        advantage_T=torch.tensor([-1.0]),
        entropy_T=None,
        mask_T=torch.tensor([1]),
    )
    assert objective.terms["policy"].value_T.item() == pytest.approx(math.exp(20), rel=1e-6)


def test_everything_missing_is_named_at_once():
    cfg = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.1)
    inputs = _inputs(rollout_logprob_T=None, ref_logprob_T=None, entropy_T=None)
    with pytest.raises(ValueError, match=r"rollout_logprob_T.*ref_logprob_T.*entropy_T"):
        policy_objective(cfg, **inputs)


def test_sft_is_the_negative_log_likelihood_of_the_masked_tokens():
    logprob_T = torch.tensor([-0.5, NAN, -2.0]).requires_grad_()
    objective = sft_objective(logprob_T=logprob_T, mask_T=torch.tensor([True, False, True]))
    assert objective.terms["sft"].value_T.tolist() == [0.5, 0.0, 2.0]
    objective.terms["sft"].value_T.sum().backward()
    assert logprob_T.grad.tolist() == [-1.0, 0.0, -1.0]

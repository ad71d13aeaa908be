"""The policy losses by hand. Axes: T tokens."""

import math

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, PolicyTokens, Sequences, get_algorithm

LN2 = math.log(2)


def tokens(log_ratios, advantages, sequence=None, *, logprob=-1.0):
    """Tokens with log-prob -1 and the log-ratios given; all of one completion unless said otherwise."""
    logprob_T = torch.full((len(log_ratios),), logprob, dtype=torch.float64, requires_grad=True)
    index_T = torch.tensor(sequence or [0] * len(log_ratios))
    sequences = Sequences(index_T, int(index_T.max()) + 1)
    old_T = logprob_T.detach() - torch.tensor(log_ratios, dtype=torch.float64)
    return PolicyTokens(logprob_T, old_T, torch.tensor(advantages, dtype=torch.float64), sequences)


def loss(name, given, **settings):
    """(values, gradient by log-prob, clipped) of an algorithm's policy loss."""
    cfg = AlgorithmConfig(name=name, **settings)
    found = cfg.algorithm.policy_loss(given, cfg)
    found.loss_T.sum().backward()
    return found.loss_T.tolist(), given.logprob_T.grad.tolist(), found.clipped_T.tolist()


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_the_clipped_loss(name):
    # Ratios 2, 1/2, 2, 1/2 with advantages 1, 1, -1, -1; bounds 0.8 and 1.28.
    given = tokens([LN2, -LN2, LN2, -LN2], [1.0, 1.0, -1.0, -1.0])
    values, gradient, clipped = loss(name, given)
    assert values == pytest.approx([-1.28, -0.5, 2.0, 0.8])
    assert gradient == pytest.approx([0.0, -0.5, 2.0, 0.0])
    assert clipped == [True, False, False, True]


def test_gspo_takes_the_geometric_mean_of_a_completions_ratios():
    # Completion 0: mean log-ratio (ln 2 + 0 - ln 2 / 2) / 3 = ln 2 / 6, ratio 2^(1/6) = 1.12246.
    # Completion 1: ratio 2, above 1.28.
    given = tokens([LN2, 0.0, -LN2 / 2, LN2], [1.0, 1.0, 1.0, 3.0], [0, 0, 0, 1])
    values, gradient, clipped = loss("gspo", given, clip_low=0.2, clip_high=0.28)
    assert values == pytest.approx([-(2 ** (1 / 6))] * 3 + [-3.84])
    assert gradient == pytest.approx([-(2 ** (1 / 6))] * 3 + [0.0])
    assert clipped == [False, False, False, True]


def test_gspos_gradient_is_that_of_the_sequence_ratio():
    """Against autograd through the whole formula, equation 7, with one loss per completion."""
    index_T = torch.tensor([0, 0, 0, 1, 1])
    old_T = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5]).double()
    new_T = torch.tensor([-0.9, -2.2, -0.4, -3.1, -1.2]).double()
    advantage_N = torch.tensor([1.5, -0.5]).double()
    direct_T = new_T.clone().requires_grad_()
    ratio_N = torch.stack([(direct_T - old_T)[index_T == n].mean().exp() for n in (0, 1)])
    direct = torch.maximum(-ratio_N * advantage_N, -ratio_N.clamp(0.8, 1.28) * advantage_N).mean()
    direct.backward()
    written_T = new_T.clone().requires_grad_()
    given = PolicyTokens(written_T, old_T, advantage_N[index_T], Sequences(index_T, 2))
    cfg = AlgorithmConfig(name="gspo", clip_low=0.2, clip_high=0.28)
    per_token_T = cfg.algorithm.policy_loss(given, cfg).loss_T
    written = (per_token_T[:3].mean() + per_token_T[3:].mean()) / 2
    written.backward()
    assert written.item() == pytest.approx(direct.item(), rel=1e-14)
    torch.testing.assert_close(written_T.grad, direct_T.grad, rtol=1e-13, atol=0)


def test_a_completion_spread_over_ranks_has_one_ratio():
    """The other rank holds a token of log-ratio 3 ln 2 of each of the two completions."""
    given = tokens([0.0, LN2], [1.0, 1.0], [0, 1])
    other_N = torch.tensor([3 * LN2, 3 * LN2]).double()
    calls = iter([other_N, torch.ones(2).double()])
    spread = Sequences(given.sequences.index_T, 2, lambda total_N: total_N + next(calls))
    given = PolicyTokens(given.logprob_T, given.old_logprob_T, given.advantage_T, spread)
    values, _, _ = loss("gspo", given, clip_low=1.0, clip_high=100.0)
    assert values == pytest.approx([-(2**1.5), -(2.0**2)])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # Weights: 8 capped at 5; 2; 1/2 without lower bound; times A times log-prob -1.
    given = tokens([3 * LN2, LN2, -LN2], [1.0, -1.0, 2.0])
    values, gradient, clipped = loss("cispo", given)
    assert values == pytest.approx([5.0, -2.0, 1.0])
    assert gradient == pytest.approx([-5.0, 2.0, -1.0])
    assert clipped == [True, False, False]
    given = tokens([-LN2], [2.0])
    assert loss("cispo", given, clip_low=0.2)[1] == pytest.approx([-1.6])


def test_sapos_gate_by_hand():
    # tau 2, r = 2: f = 2 sigmoid(2), f' = 4 s (1 - s); tau 4, r = 1/2: f = sigmoid(-2), f' = 4 s (1 - s).
    given = tokens([LN2, -LN2], [1.0, -3.0])
    values, gradient, clipped = loss("sapo", given, gate_positive=2.0, gate_negative=4.0)
    s, t = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    assert values == pytest.approx([-2 * s, 3 * t])
    assert gradient == pytest.approx([-4 * s * (1 - s) * 2, 3 * 4 * t * (1 - t) * 0.5])
    assert not any(clipped)


def test_sapo_starts_as_the_plain_policy_gradient():
    _, gradient, _ = loss("sapo", tokens([0.0, 0.0], [1.5, -2.0]))
    assert gradient == pytest.approx([-1.5, 2.0])


def test_rloo_is_the_log_likelihood_weighted_by_the_advantage():
    values, gradient, clipped = loss("rloo", tokens([LN2, -LN2], [1.5, -2.0]))
    assert values == pytest.approx([1.5, -2.0])
    assert gradient == [-1.5, 2.0]
    assert not any(clipped)


def test_every_algorithm_that_samples_says_what_it_minimises_and_where_that_is_from():
    for name in ("grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus"):
        algorithm = get_algorithm(name)
        assert algorithm.objective
        assert algorithm.advantage_formula
        assert "arXiv" in algorithm.source

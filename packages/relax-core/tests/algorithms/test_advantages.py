"""Axes: N completions, T tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.algorithms import (
    AlgorithmConfig,
    Completions,
    generalised_advantages,
    group_advantages,
    penalised_scores,
)
from relax_core.algorithms.advantages import token_rewards, whitened

# Group 7 scores 1 0 0 1: mean 1/2, sample std sqrt(4 * 0.25 / 3) = 0.5773503.
# Group 2 scores 5 3: mean 4, sample std sqrt(2).
SCORE_N = torch.tensor([1.0, 5.0, 0.0, 0.0, 3.0, 1.0])
GROUP_N = torch.tensor([7, 2, 7, 7, 2, 7])


def test_grpo_divides_by_the_sample_std_of_the_group():
    advantage_N = group_advantages(SCORE_N, GROUP_N, kind="group_std", eps=1e-6)
    expected_N = torch.tensor([0.8660239, 0.7071063, -0.8660239, -0.8660239, -0.7071063, 0.8660239])
    torch.testing.assert_close(advantage_N, expected_N, rtol=0, atol=2e-7)


def test_eps_is_added_to_the_std_and_not_to_the_variance():
    advantage_N = group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), eps=2.0 - 2.0**0.5)
    torch.testing.assert_close(advantage_N, torch.tensor([-0.5, 0.5]))


def test_dr_grpo_only_centres():
    advantage_N = group_advantages(SCORE_N, GROUP_N, kind="group_centred")
    assert advantage_N.tolist() == [0.5, 1.0, -0.5, -0.5, -1.0, 0.5]


@pytest.mark.parametrize("kind", ["group_std", "group_centred"])
def test_a_group_of_one_and_a_group_without_spread_have_exactly_no_advantage(kind):
    score_N = torch.tensor([0.1, 0.1, 0.1, 9.0, 1.0, 0.0])
    advantage_N = group_advantages(score_N, torch.tensor([0, 0, 0, 1, 2, 2]), kind=kind)
    assert advantage_N[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert advantage_N[4] > 0 > advantage_N[5]


def test_groups_never_mix_though_their_scales_differ_by_a_million():
    big_N, small_N = torch.tensor([1e6, 3e6, 2e6]), torch.tensor([1e-3, 3e-3, 2e-3])
    together_N = group_advantages(torch.cat([big_N, small_N]), torch.tensor([0, 0, 0, 1, 1, 1]))
    alone_N = group_advantages(small_N, torch.tensor([5, 5, 5]))
    assert together_N[3:].tolist() == alone_N.tolist()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=20), st.randoms())
def test_the_order_of_completions_does_not_matter(rows, random):
    shuffled = list(enumerate(rows))
    random.shuffle(shuffled)
    groups, scores = zip(*rows, strict=True)
    plain_N = group_advantages(torch.tensor(scores).double(), torch.tensor(groups))
    mixed_N = group_advantages(
        torch.tensor([r[1] for _, r in shuffled]).double(), torch.tensor([r[0] for _, r in shuffled])
    )
    torch.testing.assert_close(plain_N[[i for i, _ in shuffled]], mixed_N, rtol=1e-12, atol=1e-12)
    totals = torch.zeros(4).double().index_add(0, torch.tensor(groups), plain_N)
    assert totals.abs().max() < 1e-6


def test_float64_agrees_with_python_statistics():
    import statistics

    scores = [0.3, -1.25, 7.5, 2.0]
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    advantage_N = group_advantages(torch.tensor(scores, dtype=torch.float64), torch.zeros(4).long())
    assert advantage_N.tolist() == pytest.approx([(x - mean) / (std + 1e-6) for x in scores], rel=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused_by_position(bad):
    with pytest.raises(ValueError, match=r"completions \[1\] are not finite"):
        group_advantages(torch.tensor([0.0, bad]), torch.tensor([0, 0]))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        group_advantages(torch.zeros(2), torch.zeros(3).long())


SEQUENCE_T = torch.tensor([0, 0, 0, 1, 1])


def done(**columns):
    """Two completions of one group: three tokens with score 1, two with score 2."""
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in columns.items()}
    return Completions(torch.tensor([1.0, 2.0]).double(), torch.tensor([0, 0]), SEQUENCE_T, values)


KL = {"old_logprob": [-1.0, -2.0, -1.0, -3.0, -1.0], "ref_logprob": [-1.5, -2.0, -3.0, -2.0, -1.0]}
"""k1 is 0.5, 0, 2 in the first completion and -1, 0 in the second."""


def test_the_kl_penalty_sums_over_the_tokens_of_each_completion():
    score_N = penalised_scores(done(**KL), AlgorithmConfig(kl="k1", kl_reward_coef=0.1))
    assert score_N.tolist() == pytest.approx([1 - 0.25, 2 + 0.1])
    assert penalised_scores(done(), AlgorithmConfig()).tolist() == [1.0, 2.0]


def test_leaving_one_out_by_hand_and_by_the_mean_of_the_others():
    score_N, group_N = torch.tensor([1.0, 4.0, 7.0, 2.0, 3.0, 5.0]).double(), torch.tensor([3, 3, 3, 1, 1, 0])
    advantage_N = group_advantages(score_N, group_N, kind="leave_one_out")
    assert advantage_N.tolist() == pytest.approx([1 - 5.5, 4 - 4.0, 7 - 2.5, 2 - 3.0, 3 - 2.0, 0.0])


def test_the_score_is_the_reward_of_the_last_token_and_the_kl_of_every_token():
    reward_T = token_rewards(done(**KL), AlgorithmConfig(name="reinforce_plus_plus", kl_reward_coef=0.1))
    assert reward_T.tolist() == pytest.approx([-0.05, 0.0, 1 - 0.2, 0.1, 2.0])


def test_a_completion_without_tokens_gives_no_reward():
    empty = Completions(torch.tensor([5.0, 2.0]).double(), torch.tensor([0, 0]), torch.tensor([1, 1]))
    assert token_rewards(empty, AlgorithmConfig()).tolist() == [0.0, 2.0]


def test_generalised_advantages_by_hand():
    reward_T = torch.tensor([0.0, 0.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    value_T = torch.tensor([0.2, 0.4, 0.6, 1.0, 3.0], dtype=torch.float64)
    advantage_T = generalised_advantages(reward_T, value_T, SEQUENCE_T, gamma=0.9, lam=0.5)
    # First: deltas -0.2 + 0.9 x 0.4 = 0.16; -0.4 + 0.9 x 0.6 = 0.14; 1 - 0.6 = 0.4; each later one x 0.45.
    # Second: 0.5 + 0.9 x 3 - 1 = 2.2; 2 - 3 = -1.
    first = [0.16 + 0.45 * (0.14 + 0.45 * 0.4), 0.14 + 0.45 * 0.4, 0.4]
    assert advantage_T.tolist() == pytest.approx([*first, 2.2 - 0.45, -1.0], rel=1e-14)


def test_without_values_and_discount_they_are_the_sums_of_what_follows():
    reward_T = torch.tensor([1.0, -2.0, 4.0, 8.0, 16.0]).double()
    sums_T = generalised_advantages(reward_T, reward_T * 0, SEQUENCE_T, gamma=1.0, lam=1.0)
    assert sums_T.tolist() == [3.0, 2.0, 4.0, 24.0, 16.0]


def test_whitening_by_hand():
    # Mean 3, deviations -2, 0, 2, variance 8 / 2 = 4.
    assert whitened(torch.tensor([1.0, 3.0, 5.0]).double()).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert whitened(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]

"""Axes: N completions, T tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.algorithms import group_advantages, penalised_scores

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


def test_the_kl_penalty_sums_over_the_tokens_of_the_completion_only():
    kl_T = torch.tensor([float("nan"), 0.5, 0.25, 9.0, 1.0])
    mask_T = torch.tensor([False, True, True, False, True])
    score_N = penalised_scores(torch.tensor([1.0, 2.0]), kl_T, mask_T, (3, 2), 0.1)
    torch.testing.assert_close(score_N, torch.tensor([1.0 - 0.075, 2.0 - 0.1]))


def test_the_kl_penalty_refuses_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="2 sequences of 4 positions"):
        penalised_scores(torch.zeros(2), torch.zeros(5), torch.ones(5), (2, 2), 0.1)

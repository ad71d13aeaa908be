"""The second-moment mask by hand. Axes: T tokens."""

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, PolicyTokens, Sequences
from relax_core.algorithms.builtin import m2po


def kept(log_ratios, limit, advantages=None):
    cfg = AlgorithmConfig(name="m2po", second_moment_limit=limit)
    columns = {
        "logprob": torch.tensor(log_ratios, dtype=torch.float64) - 2,
        "rollout_logprob": torch.full((len(log_ratios),), -2.0, dtype=torch.float64),
        # Outward where nothing else is said: the sign of the log-ratio.
        "advantage": torch.tensor(advantages or log_ratios, dtype=torch.float64),
    }
    return cfg.algorithm.batch_columns(columns, cfg)["kept"].tolist()


def test_the_largest_log_ratios_are_left_out_until_the_mean_square_fits():
    # Squares 0.01, 0.04, 1, 0.25; sorted 0.01, 0.04, 0.25, 1 with running means 0.01, 0.025, 0.1, 0.325.
    ratios = [-0.1, 0.2, 1.0, -0.5]
    assert kept(ratios, 0.04) == [1, 1, 0, 0]
    assert kept(ratios, 0.099) == [1, 1, 0, 0]
    assert kept(ratios, 0.101) == [1, 1, 0, 1]
    assert kept(ratios, 0.33) == [1, 1, 1, 1]
    assert kept(ratios, 0.005) == [0, 0, 0, 0]


def test_only_tokens_that_move_away_from_the_engine_count_and_are_left_out():
    # Outward are the first (A > 0, r > 1) and the last (A < 0, r < 1), with squares 0.01 and 1; the others
    # would be drawn back, and PPO clips none of them. Their squares 9 and 4 do not count.
    ratios, advantages = [0.1, -3.0, 2.0, -1.0], [1.0, 1.0, -1.0, -1.0]
    assert kept(ratios, 0.04, advantages) == [1, 1, 1, 0]
    assert kept(ratios, 0.505, advantages) == [1, 1, 1, 1], "the mean of 0.01 and 1"
    assert kept(ratios, 0.504, advantages) == [1, 1, 1, 0]
    assert kept(ratios, 0.04, [0.0] * 4) == [1, 1, 1, 1], "nothing moves them"


@pytest.mark.parametrize("length", [0, 1, 2, 3, 100])
def test_the_running_sum_is_that_of_numbers_one_by_one(length):
    numbers = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).square()
    torch.testing.assert_close(m2po._running_sum(numbers), numbers.cumsum(0), rtol=1e-14, atol=0)


def test_equal_policies_leave_nothing_out():
    assert kept([0.0, 0.0], 0.04) == [1, 1]


def test_the_loss_is_the_ratio_times_the_advantage_where_a_token_is_kept():
    logprob_T = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    given = PolicyTokens(
        logprob_T, torch.tensor([-1.5, -1.0]).double(), torch.tensor([2.0, 3.0]).double(),
        Sequences(torch.zeros(2, dtype=torch.int64), 1), {"kept": torch.tensor([1.0, 0.0])},
    )  # fmt: skip
    cfg = AlgorithmConfig(name="m2po")
    found = cfg.algorithm.policy_loss(given, cfg)
    found.loss_T.sum().backward()
    assert found.loss_T.tolist() == pytest.approx([-2 * 1.6487212707, 0.0])
    assert logprob_T.grad.tolist() == pytest.approx([-2 * 1.6487212707, 0.0])
    assert found.clipped_T.tolist() == [False, True]


def test_m2po_has_no_correction_of_its_own_ratio():
    assert AlgorithmConfig(name="m2po").correction_in_use == "none"
    with pytest.raises(ValueError, match="correction 'icepop' has no effect with algorithm 'm2po'"):
        AlgorithmConfig(name="m2po", correction="icepop")

"""Axes: T tokens."""

import torch
from relax_core.algorithms import clipped_policy_loss


def _loss(ratios, advantages, **settings):
    ratio_T = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    clipped = clipped_policy_loss(ratio_T, torch.tensor(advantages, dtype=torch.float64), **settings)
    clipped.loss_T.sum().backward()
    return clipped, ratio_T.grad


def test_each_side_clips_only_where_the_step_would_go_too_far():
    # r:            0.5   1.0   1.5   0.5    1.0    1.5
    # A:             2     2     2    -2     -2     -2
    # -rA:          -1    -2    -3     1      2      3
    # -clip(r)A:   -1.6   -2   -2.6   1.6     2     2.6      bounds 0.8 and 1.3
    clipped, grad_T = _loss([0.5, 1, 1.5, 0.5, 1, 1.5], [2, 2, 2, -2, -2, -2], clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(clipped.loss_T.tolist(), [-1.0, -2.0, -2.6, 1.6, 2.0, 3.0])
    assert clipped.clipped_T.tolist() == [False, False, True, True, False, False]
    assert grad_T.tolist() == [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]
    assert not clipped.dual_clipped_T.any()


def test_the_gradient_is_whole_exactly_at_ratio_one():
    _, grad_T = _loss([1.0, 1.0], [3.0, -3.0], clip_low=0.2, clip_high=0.2)
    assert grad_T.tolist() == [-3.0, 3.0]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # r 5 and 2 with A -1, c 3: -rA 5 and 2 become 3 and 2; r 5 with A +1 meets the upper clip as before.
    clipped, grad_T = _loss([5, 2, 5], [-1, -1, 1], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert clipped.loss_T.tolist() == [3.0, 2.0, -1.2]
    assert clipped.dual_clipped_T.tolist() == [True, False, False]
    assert grad_T.tolist() == [0.0, 1.0, 0.0]


def test_an_advantage_of_zero_has_neither_loss_nor_gradient_nor_clip():
    clipped, grad_T = _loss([0.1, 9.0], [0, 0], clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    assert clipped.loss_T.abs().tolist() == [0.0, 0.0]
    assert grad_T.abs().tolist() == [0.0, 0.0]
    assert not clipped.clipped_T.any()
    assert not clipped.dual_clipped_T.any()

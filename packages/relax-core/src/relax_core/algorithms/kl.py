"""Estimates of the KL divergence from sampled tokens.

Axes: T packed tokens.
"""

from typing import TYPE_CHECKING, assert_never

from relax_core.algorithms.kinds import KlEstimator
from relax_core.algorithms.ratio import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

_LOW_VAR_BOUND = 10.0


def kl_estimate(kind: KlEstimator, logprob_T: "Tensor", ref_logprob_T: "Tensor") -> "Tensor":
    """KL(policy || reference) of each token, for tokens sampled from the policy.

    With d = log-prob of the policy - log-prob of the reference (Schulman 2020, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html):

        k1       d                     unbiased, may be negative
        k2       d^2 / 2               biased, low variance; its gradient is that of the true KL
        k3       exp(-d) - 1 + d       unbiased, never negative
        low_var  k3 within +-10        k3 that one unlucky token cannot blow up

    In k3 and low_var the exponent is held within +-20, so that the result is finite; beyond it the
    exponential has no gradient.

    Args:
        kind: the estimator.
        logprob_T: [T] float, with or without gradient.
        ref_logprob_T: [T] float, no gradient.

    Returns:
        [T] float, in nats.
    """
    difference_T = logprob_T - ref_logprob_T
    if kind == "k1":
        return difference_T
    if kind == "k2":
        return difference_T.square() / 2
    # expm1(-d) + d would lose every digit near d = 0 if written as exp(-d) - 1 + d.
    k3_T = (-difference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + difference_T
    if kind == "k3":
        return k3_T
    if kind == "low_var":
        return k3_T.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND)
    assert_never(kind)

"""M2PO: a bound on the second moment of log-ratios in place of a clip, for stale samples.

Axes: T tokens of a whole mini-batch, or of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.algorithms.algorithm import CORRECTION_SETTINGS, PolicyTokens
from relax_core.algorithms.builtin.grpo import GRPO
from relax_core.algorithms.clipping import Clipped
from relax_core.algorithms.ratio import bounded_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


def kept_tokens(columns: "Mapping[str, Tensor]", cfg: "AlgorithmConfig") -> "dict[str, Tensor]":
    """Column `kept` [T]: 0 for the tokens that the second moment forbids, over the whole mini-batch.

    r = pi / pi_behaviour, the present policy over the engine's. Zheng et al. 2025, Prosperity before
    Collapse, arXiv 2510.01161, algorithm 1: of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and
    r < 1), those of the largest (log r)^2 are left out until the mean of (log r)^2 over those that remain is
    at most tau. Every other token is kept: its gradient draws r towards 1. (AReaL's `m2po` bounds the mean
    over all tokens instead, and may leave out those as well.)
    """
    log_ratio_T = columns["logprob"] - columns["rollout_logprob"]
    outward_T = columns["advantage"] * log_ratio_T > 0
    # Sorted, tokens that are not outward lie behind all that are, and are kept whatever their number.
    second_T = log_ratio_T.square().masked_fill(~outward_T, float("inf"))
    ordered_T, order_T = second_T.sort(stable=True)
    mean_T = _running_sum(ordered_T) / order_T.new_ones(order_T.shape).cumsum(0)
    within_T = (mean_T <= cfg.second_moment_limit) | ~outward_T[order_T]
    return {"kept": second_T.new_zeros(second_T.shape).index_copy(0, order_T, within_T.to(second_T.dtype))}


def _running_sum(value_T: "Tensor") -> "Tensor":
    """`cumsum`, which gives other bits from run to run on CUDA: sums of 1, 2, 4, ... values joined."""
    width = 1
    while width < len(value_T):
        longer_T = value_T.clone()
        longer_T[width:] += value_T[:-width]
        value_T, width = longer_T, 2 * width
    return value_T


def second_moment_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """-M r A, with M the column `kept`; no clip."""
    kept_T = tokens.columns["kept"]
    loss_T = -kept_T * bounded_ratio(tokens.log_ratio_T) * tokens.advantage_T
    left_out_T = kept_T == 0
    return Clipped(loss_T, left_out_T, left_out_T & False)


M2PO = replace(
    GRPO,
    name="m2po",
    summary="Policy gradient on stale samples: of the tokens that move further from the engine, those of the "
    "largest log-ratios are left out.",
    source="Zheng et al. 2025, Prosperity before Collapse, arXiv 2510.01161, algorithm 1",
    objective="-M r A; of the tokens with A log r > 0, M = 0 for those of the largest (log r)^2 until the "
    "mean of the others is at most second_moment_limit",
    policy_loss=second_moment_loss,
    batch_columns=kept_tokens,
    default_reduction="token_mean",
    settings=GRPO.settings - CORRECTION_SETTINGS - {"clip_low", "clip_high", "dual_clip"}
    | {"second_moment_limit"},
    ratio_to="rollout",
    needs_scores=True,
)

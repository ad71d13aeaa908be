"""GSPO: the ratio of a whole completion.

Axes: T tokens.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.algorithms.algorithm import PolicyTokens
from relax_core.algorithms.builtin.grpo import GRPO
from relax_core.algorithms.clipping import Clipped, clipped_policy_loss
from relax_core.algorithms.ratio import bounded_ratio

if TYPE_CHECKING:
    from relax_core.algorithms.config import AlgorithmConfig


def sequence_ratio_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A) at every token, s the completion's ratio.

    s = (pi(y|x) / pi_old(y|x))^(1/|y|) = exp(mean over the completion of log pi - log pi_old): Zheng et al.
    2025, GSPO, arXiv 2507.18071, equations 5 to 7. Written per token as in its equations 13 and 14: s_t =
    sg(s) pi_t / sg(pi_t), sg without gradient, has the value s, and its mean over the completion has the
    gradient of s. So the gradient needs no token of another context-parallel rank, only the value of s does.
    """
    sequence_T = tokens.sequences.mean(tokens.log_ratio_T)
    ratio_T = bounded_ratio(sequence_T + (tokens.logprob_T - tokens.logprob_T.detach()))
    low, high = cfg.clip_range
    return clipped_policy_loss(
        ratio_T, tokens.advantage_T, clip_low=low, clip_high=high, dual_clip=cfg.dual_clip
    )


GSPO = replace(
    GRPO,
    name="gspo",
    summary="GRPO with one ratio for a whole completion: the geometric mean of its tokens' ratios.",
    source="Zheng et al. 2025, GSPO, arXiv 2507.18071, equations 5 to 7, 13, 14",
    objective="max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over completion of log r)",
    level="sequence",
    policy_loss=sequence_ratio_loss,
    clip=(3e-4, 4e-4),
    reductions=frozenset({"sequence_mean"}),
)

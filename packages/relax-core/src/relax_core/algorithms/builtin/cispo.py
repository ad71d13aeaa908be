"""CISPO: the importance weight is clipped, no token's gradient is.

Axes: T tokens.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.algorithms.algorithm import PolicyTokens
from relax_core.algorithms.builtin.grpo import GRPO
from relax_core.algorithms.clipping import Clipped
from relax_core.algorithms.ratio import bounded_ratio

if TYPE_CHECKING:
    from relax_core.algorithms.config import AlgorithmConfig


def clipped_weight_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, sg without gradient.

    MiniMax 2025, MiniMax-M1, arXiv 2506.13585, equations 4 and 5. There is no lower bound in the paper, which
    is clip_low = 1. `clipped_T` says where the weight was clipped; the gradient is there all the same.
    """
    low, high = cfg.clip_range
    ratio_T = bounded_ratio(tokens.log_ratio_T).detach()
    weight_T = ratio_T.clamp(1 - low, 1 + high)
    clipped_T = weight_T != ratio_T
    return Clipped(-weight_T * tokens.advantage_T * tokens.logprob_T, clipped_T, clipped_T & False)


CISPO = replace(
    GRPO,
    name="cispo",
    summary="REINFORCE with a clipped importance weight: no token loses its gradient.",
    source="MiniMax 2025, MiniMax-M1, arXiv 2506.13585, equations 4 and 5",
    objective="-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
    policy_loss=clipped_weight_loss,
    clip=(1.0, 4.0),
    default_reduction="token_mean",
    settings=GRPO.settings - {"dual_clip"},
)

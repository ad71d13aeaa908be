"""GRPO, and what differs from it in settings alone: Dr. GRPO and DAPO.

Axes: N completions, T tokens.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from relax_core.algorithms.advantages import group_advantages, penalised_scores
from relax_core.algorithms.algorithm import POLICY_SETTINGS, Algorithm, Completions, PolicyTokens
from relax_core.algorithms.clipping import Clipped, clipped_policy_loss
from relax_core.algorithms.kinds import Reduction
from relax_core.algorithms.ratio import bounded_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


def group_advantage(
    done: Completions,
    cfg: "AlgorithmConfig",
    *,
    kind: Literal["group_std", "group_centred", "leave_one_out"] = "group_std",
) -> "Tensor":
    """[T]: every token has its completion's advantage in the group; see `group_advantages`."""
    score_N = penalised_scores(done, cfg)
    return group_advantages(score_N, done.group_N, kind=kind, eps=cfg.advantage_eps)[done.sequence_T]


def clipped_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """PPO's clipped loss of the token's ratio; see `clipped_policy_loss`."""
    low, high = cfg.clip_range
    return clipped_policy_loss(
        bounded_ratio(tokens.log_ratio_T),
        tokens.advantage_T,
        clip_low=low,
        clip_high=high,
        dual_clip=cfg.dual_clip,
    )


CLIPPED = "max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)"
ANY_MEAN: frozenset[Reduction] = frozenset({"token_mean", "sequence_mean", "group_mean", "fixed_length"})

GRPO = Algorithm(
    name="grpo",
    summary="Clipped policy gradient on the scores of a group, centred and divided by their std.",
    source="Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, equation 3 and section 4.1.2",
    objective=CLIPPED,
    advantage_formula="(x - mean of group) / (std of group + advantage_eps)",
    loop="rl",
    advantage=group_advantage,
    policy_loss=clipped_loss,
    min_group_size=2,
    default_reduction="sequence_mean",
    reductions=ANY_MEAN,
    settings=POLICY_SETTINGS | {"advantage_eps", "dual_clip"},
)

DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    summary="GRPO without its two biases: scores are only centred, and tokens divided by a fixed length.",
    source="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
    advantage_formula="x - mean of group",
    advantage=partial(group_advantage, kind="group_centred"),
    default_reduction="fixed_length",
    settings=GRPO.settings - {"advantage_eps"},
)

DAPO = replace(
    GRPO,
    name="dapo",
    summary="GRPO with a higher upper clip, a mean over all tokens, and only groups whose rewards differ; "
    "reward.overlong_tokens shapes the reward of long completions.",
    source="Yu et al. 2025, DAPO, arXiv 2503.14476, equations 8 to 13",
    default_reduction="token_mean",
    needs_dynamic_sampling=True,
)

"""RLOO and REINFORCE++: policy gradients without a critic.

Axes: N completions, T tokens.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from relax_core.algorithms.advantages import generalised_advantages, group_advantages, token_rewards, whitened
from relax_core.algorithms.algorithm import Completions, PolicyTokens
from relax_core.algorithms.builtin.grpo import GRPO, group_advantage
from relax_core.algorithms.clipping import Clipped, unclipped

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


def likelihood_loss(tokens: PolicyTokens, cfg: "AlgorithmConfig") -> Clipped:
    """-A log pi: REINFORCE (Williams 1992), for weights that are those which sampled."""
    return unclipped(-tokens.advantage_T * tokens.logprob_T)


def returns_advantage(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: the score minus the KL from each token on, over the batch's tokens whitened.

    A_t = score - kl_reward_coef sum over i >= t of KL_i, then (A - mean) / std over all tokens of the batch:
    Hu et al. 2025, REINFORCE++, arXiv 2501.03262. Its KL is the estimator k1.
    """
    reward_T = token_rewards(done, cfg)
    return whitened(generalised_advantages(reward_T, reward_T * 0, done.sequence_T, gamma=1.0, lam=1.0))


def baseline_advantage(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: the score minus the mean of its group, over the batch's tokens whitened.

    Hu et al. 2025, REINFORCE++, arXiv 2501.03262, variant with a group baseline. A KL is a loss of
    its own there (k2), see kl_loss_coef.
    """
    return whitened(group_advantages(done.score_N, done.group_N, kind="group_centred")[done.sequence_T])


RLOO = replace(
    GRPO,
    name="rloo",
    summary="REINFORCE on whole completions; the baseline is the mean score of the group's others.",
    source="Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740 (RLOO); Kool et al. 2019",
    objective="-A log pi, summed over a completion",
    advantage_formula="x - mean of the group's others",
    advantage=partial(group_advantage, kind="leave_one_out"),
    policy_loss=likelihood_loss,
    default_reduction="sequence_sum",
    reductions=GRPO.reductions | {"sequence_sum"},
    settings=GRPO.settings - {"advantage_eps", "clip_low", "clip_high", "dual_clip"},
    on_policy=True,
)

REINFORCE_PLUS_PLUS = replace(
    GRPO,
    name="reinforce_plus_plus",
    summary="Clipped policy gradient on the score minus the KL of what follows, whitened over the batch; "
    "one completion a prompt is enough.",
    source="Hu et al. 2025, REINFORCE++, arXiv 2501.03262",
    advantage_formula="whitened over tokens: x - kl_reward_coef (sum of KL from t on)",
    advantage=returns_advantage,
    min_group_size=1,
    default_kl="k1",
    default_reduction="token_mean",
    settings=GRPO.settings - {"advantage_eps"},
)

REINFORCE_PLUS_PLUS_BASELINE = replace(
    GRPO,
    name="reinforce_plus_plus_baseline",
    summary="Clipped policy gradient on scores centred in their group, whitened over the batch.",
    source="Hu et al. 2025, REINFORCE++, arXiv 2501.03262",
    advantage_formula="whitened over tokens: x - mean of group",
    advantage=baseline_advantage,
    default_kl="k2",
    default_reduction="token_mean",
    settings=GRPO.settings - {"advantage_eps", "kl_reward_coef"},
)

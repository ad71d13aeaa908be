"""PPO: a critic's values, and advantages estimated from them.

Axes: T tokens.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from relax_core.algorithms.advantages import generalised_advantages, token_rewards, whitened
from relax_core.algorithms.algorithm import Completions
from relax_core.algorithms.builtin.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.algorithms.config import AlgorithmConfig


class ValueLoss(NamedTuple):
    """Loss of each token's value, and where the clip took the gradient away."""

    loss_T: "Tensor"
    clipped_T: "Tensor"


def estimated_advantages(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: generalised advantages of the token rewards, over the batch's tokens whitened if so set.

    Schulman et al. 2015, arXiv 1506.02438, equation 16; see `generalised_advantages`, `token_rewards`.
    """
    advantage_T = _advantages(done, cfg)
    return whitened(advantage_T) if cfg.whiten_advantages else advantage_T


def value_targets(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    """[T]: what the critic should have said, the generalised advantage plus the value."""
    return _advantages(done, cfg) + done.columns["value"]


def value_loss(
    value_T: "Tensor", old_value_T: "Tensor", target_T: "Tensor", *, clip: float | None
) -> ValueLoss:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2.

    The squared error of Schulman et al. 2017 (PPO, arXiv 1707.06347, equation 9), clipped as in OpenAI's
    implementation of it (Engstrom et al. 2020, arXiv 2005.12729, section 3).

    Args:
        value_T: [T] float, with gradient.
        old_value_T: [T] float, before the first optimizer step of the batch.
        target_T: [T] float.
        clip: how far a value may move in one batch; None is off.
    """
    plain_T = (value_T - target_T).square() / 2
    if clip is None:
        return ValueLoss(plain_T, plain_T.detach() < 0)
    change_T = value_T - old_value_T
    bounded_T = (old_value_T + change_T.clamp(-clip, clip) - target_T).square() / 2
    # Within the clip both are the same number, but for rounding.
    clipped_T = (change_T.abs() > clip) & (bounded_T > plain_T)
    return ValueLoss(bounded_T.where(clipped_T, plain_T), clipped_T)


def _advantages(done: Completions, cfg: "AlgorithmConfig") -> "Tensor":
    return generalised_advantages(
        token_rewards(done, cfg),
        done.columns["value"],
        done.sequence_T,
        gamma=cfg.gae_gamma,
        lam=cfg.gae_lambda,
    )


PPO = replace(
    GRPO,
    name="ppo",
    summary="Clipped policy gradient on generalised advantages from a critic, which is trained beside it.",
    source="Schulman et al. 2017, arXiv 1707.06347, equations 7 and 9; GAE: arXiv 1506.02438, equation 16",
    objective=f"{GRPO.objective}; the critic: (V - R)^2 / 2, clipped by value_clip",
    advantage_formula="whitened over tokens: sum of (gae_gamma gae_lambda)^l (r + gae_gamma V' - V)",
    advantage=estimated_advantages,
    value_target=value_targets,
    needs_critic=True,
    min_group_size=1,
    default_kl="k1",
    default_reduction="token_mean",
    settings=GRPO.settings - {"advantage_eps"}
    | {"gae_gamma", "gae_lambda", "whiten_advantages", "value_clip"},
)

"""What is minimised: per-token loss terms, with per-token diagnostics beside them.

Axes: T packed positions of one micro-batch. Log-probs are those of the token at each position, in nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_core.algorithms.algorithm import PolicyTokens
from relax_core.algorithms.config import AlgorithmConfig
from relax_core.algorithms.importance import correction_log_ratio, importance_weight
from relax_core.algorithms.kl import kl_estimate
from relax_core.algorithms.ratio import bounded_ratio
from relax_core.algorithms.sequences import Sequences


@dataclass(frozen=True)
class Term:
    """One per-token quantity of the loss, before its coefficient.

    Attributes:
        value_T: [T] float, with gradient; 0 where the mask is not set.
        coefficient: factor in the loss; 0 makes the term a metric.
    """

    value_T: Tensor
    coefficient: float


@dataclass(frozen=True)
class Objective:
    """The terms whose reduced, weighted sum is the loss, and what to watch.

    Attributes:
        terms: by name: policy, kl, entropy, or sft.
        diagnostics: [T] float without gradient, by name; 0 where the mask is not set.
    """

    terms: Mapping[str, Term]
    diagnostics: Mapping[str, Tensor]


def policy_objective(
    cfg: AlgorithmConfig,
    *,
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    rollout_logprob_T: Tensor | None,
    ref_logprob_T: Tensor | None,
    advantage_T: Tensor,
    entropy_T: Tensor | None,
    mask_T: Tensor,
    sequences: Sequences | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Objective:
    """Terms of a policy gradient: importance weight x the algorithm's policy loss, KL and entropy.

    The policy ratio is exp(logprob - old_logprob), its exponent held within +-20 so that it stays finite.
    Positions outside of the mask are never read: NaN there reaches neither a value nor a gradient.

    Args:
        cfg: the algorithm's settings.
        logprob_T: [T] float, under the weights being trained, with gradient.
        old_logprob_T: [T] float, by the trainer before the first optimizer step of the batch.
        rollout_logprob_T: [T] float, by the engine that sampled; may be None without a correction.
        ref_logprob_T: [T] float, of the frozen reference; None if no KL is wanted as a loss.
        advantage_T: [T] float.
        entropy_T: [T] float, of the policy's distribution, with gradient; None if no bonus is wanted.
        mask_T: [T] bool, the completion's tokens.
        sequences: which completion each token belongs to; one for all when None.
        columns: [T] float by name, what else the algorithm's policy loss reads.

    Returns:
        terms: policy (1), kl (kl_loss_coef) if there is a reference, entropy (-entropy_coef) if given.
        diagnostics: ratio, clip_fraction (0 or 1), dual_clip_fraction (0 or 1), policy_kl (k3 of the policy
            before the batch against the one now), importance_weight, and, if there is a rollout, logprob_gap
            (absolute), rollout_kl (k3 of the engine against the trainer) and correction_fraction (1 where
            the weight is capped or dropped); with a reference kl,
            with an entropy entropy.

    Raises:
        ValueError: a log-prob that the settings need is missing.
    """
    _check_inputs(cfg, rollout_logprob_T, ref_logprob_T, entropy_T)
    mask_T = mask_T.bool()

    def inside(value_T: Tensor) -> Tensor:
        return torch.where(mask_T, value_T, value_T.new_zeros(()))

    logprob_T, old_logprob_T, advantage_T = inside(logprob_T), inside(old_logprob_T), inside(advantage_T)
    ratio_T = bounded_ratio(logprob_T - old_logprob_T)
    policy_loss = cfg.algorithm.policy_loss
    assert policy_loss is not None, "the algorithm has no policy ratio"
    if sequences is None:
        sequences = Sequences(torch.zeros_like(mask_T, dtype=torch.int64), 1)
    tokens = PolicyTokens(logprob_T, old_logprob_T, advantage_T, sequences, columns or {})
    clipped = policy_loss(tokens, cfg)
    weight_T = torch.ones_like(old_logprob_T)
    diagnostics = {
        "ratio": ratio_T,
        "clip_fraction": clipped.clipped_T,
        "dual_clip_fraction": clipped.dual_clipped_T,
        "policy_kl": kl_estimate("k3", old_logprob_T, logprob_T),
    }
    if rollout_logprob_T is not None:
        rollout_logprob_T = inside(rollout_logprob_T)
        low, high = cfg.correction_band
        kind = cfg.correction_in_use
        log_ratio_T = inside(
            correction_log_ratio(cfg.correction_level_in_use, old_logprob_T, rollout_logprob_T, sequences)
        )
        weight_T = importance_weight(kind, log_ratio_T, low=low, high=high)
        # Where the ratio is to the engine, only the present weights tell what the trainer thinks.
        trainer_T = logprob_T.detach() if cfg.algorithm.ratio_to == "rollout" else old_logprob_T
        gap_T = trainer_T - rollout_logprob_T
        diagnostics["logprob_gap"] = gap_T.abs()
        diagnostics["rollout_kl"] = kl_estimate("k3", rollout_logprob_T, trainer_T)
        changed_T = torch.zeros_like(mask_T) if kind == "none" else _outside_band(log_ratio_T, low, high)
        diagnostics["correction_fraction"] = changed_T
    diagnostics["importance_weight"] = weight_T
    terms = {"policy": Term(inside(weight_T * clipped.loss_T), 1.0)}
    if ref_logprob_T is not None:
        kl_T = inside(kl_estimate(cfg.kl_estimator, logprob_T, inside(ref_logprob_T)))
        terms["kl"] = Term(kl_T, cfg.kl_loss_coef)
        diagnostics["kl"] = kl_T
    if entropy_T is not None:
        entropy_T = inside(entropy_T)
        terms["entropy"] = Term(entropy_T, -cfg.entropy_coef)
        diagnostics["entropy"] = entropy_T
    return Objective(terms, {k: inside(v.detach().to(logprob_T.dtype)) for k, v in diagnostics.items()})


def sft_objective(*, logprob_T: Tensor, mask_T: Tensor) -> Objective:
    """Negative log-likelihood of the tokens to learn.

    Args:
        logprob_T: [T] float, with gradient.
        mask_T: [T] bool, the assistant's tokens.

    Returns:
        terms: sft (1). diagnostics: none.
    """
    return Objective({"sft": Term(torch.where(mask_T.bool(), -logprob_T, logprob_T.new_zeros(())), 1.0)}, {})


def _outside_band(log_ratio_T: Tensor, low: float, high: float) -> Tensor:
    ratio_T = bounded_ratio(log_ratio_T)
    return (ratio_T < low) | (ratio_T > high)


def _check_inputs(
    cfg: AlgorithmConfig, rollout_T: Tensor | None, ref_T: Tensor | None, entropy_T: Tensor | None
) -> None:
    missing = []
    if cfg.correction_in_use != "none" and rollout_T is None:
        missing.append(
            f"correction {cfg.correction!r} needs rollout_logprob_T: give it, or set correction to none"
        )
    if cfg.kl_loss_coef > 0 and ref_T is None:
        missing.append(
            f"kl_loss_coef {cfg.kl_loss_coef:g} needs ref_logprob_T: give it, or set the coefficient to 0"
        )
    if cfg.entropy_coef > 0 and entropy_T is None:
        missing.append(
            f"entropy_coef {cfg.entropy_coef:g} needs entropy_T: give it, or set the coefficient to 0"
        )
    if missing:
        raise ValueError("; ".join(missing))

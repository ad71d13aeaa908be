"""Correction of the gap between the trainer's and the rollout engine's log-probs.

Axes: T packed tokens.
"""

from typing import assert_never

import torch
from torch import Tensor

from relax_core.algorithms.kinds import Correction
from relax_core.algorithms.ratio import bounded_ratio


def importance_weight(
    kind: Correction, trainer_logprob_T: Tensor, rollout_logprob_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Weight of each token's policy loss, from r = exp(trainer - rollout log-prob) under the same weights.

        none       1
        truncated  min(r, high)                       Yao et al. 2025, "Your Efficient RL Framework Secretly
                                                      Brings You Off-Policy RL Training" (TIS)
        icepop     r where low <= r <= high, else 0   Ling team 2025, "Every Step Evolves", arXiv 2510.18855

    Args:
        kind: the correction.
        trainer_logprob_T: [T] float, of the sampled tokens, by the trainer, before the first optimizer step.
        rollout_logprob_T: [T] float, of the same tokens, by the engine that sampled them.
        low: lower end of the band of icepop.
        high: upper end of the band, or the cap of truncated.

    Returns:
        [T] float without gradient.
    """
    if kind == "none":
        return torch.ones_like(trainer_logprob_T, requires_grad=False)
    log_ratio_T = (trainer_logprob_T - rollout_logprob_T).detach()
    ratio_T = bounded_ratio(log_ratio_T)
    if kind == "truncated":
        return ratio_T.clamp(max=high)
    if kind == "icepop":
        return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, torch.zeros_like(ratio_T))
    assert_never(kind)

"""Correction of the gap between the trainer's and the rollout engine's log-probs.

Axes: T packed tokens.
"""

from typing import assert_never

import torch
from torch import Tensor

from relax_core.algorithms.kinds import Correction, CorrectionLevel
from relax_core.algorithms.ratio import bounded_ratio
from relax_core.algorithms.sequences import Sequences


def correction_log_ratio(
    level: CorrectionLevel, trainer_logprob_T: Tensor, rollout_logprob_T: Tensor, sequences: Sequences
) -> Tensor:
    """Log of the ratio that is corrected for, from the difference d of log-probs, trainer - rollout.

        token      d of the token                     biased, of low variance
        sequence   sum of d over the completion       unbiased; the same at each of its tokens
        geometric  mean of d over the completion      of a length-free scale

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch", compares token and sequence, truncated and masked.

    Args:
        level: of the ratio.
        trainer_logprob_T: [T] float, of the sampled tokens, by the trainer, before the first optimizer step.
        rollout_logprob_T: [T] float, of the same tokens, by the engine that sampled them.
        sequences: which completion each token belongs to.

    Returns:
        [T] float without gradient.
    """
    log_ratio_T = (trainer_logprob_T - rollout_logprob_T).detach()
    if level == "token":
        return log_ratio_T
    if level == "sequence":
        return sequences.sum(log_ratio_T)
    if level == "geometric":
        return sequences.mean(log_ratio_T)
    assert_never(level)


def importance_weight(kind: Correction, log_ratio_T: Tensor, *, low: float, high: float) -> Tensor:
    """Weight of each token's policy loss, from r = exp(log_ratio).

        none       1
        truncated  min(r, high)                       Yao et al. 2025, "Your Efficient RL Framework Secretly
                                                      Brings You Off-Policy RL Training" (TIS)
        icepop     r where low <= r <= high, else 0   Ling team 2025, "Every Step Evolves", arXiv 2510.18855;
                                                      at the level of sequences, masked importance sampling

    Args:
        kind: the correction.
        log_ratio_T: [T] float, from `correction_log_ratio`.
        low: lower end of the band of icepop.
        high: upper end of the band, or the cap of truncated.

    Returns:
        [T] float without gradient.
    """
    if kind == "none":
        return torch.ones_like(log_ratio_T)
    ratio_T = bounded_ratio(log_ratio_T)
    if kind == "truncated":
        return ratio_T.clamp(max=high)
    if kind == "icepop":
        return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, torch.zeros_like(ratio_T))
    assert_never(kind)

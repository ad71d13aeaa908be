"""The named choices of an algorithm, free of torch so that the configuration can read them quickly."""

from typing import Literal

KlEstimator = Literal["k1", "k2", "k3", "low_var"]
"""How KL(policy || reference) is estimated from sampled tokens; see `kl_estimate`."""

Correction = Literal["none", "truncated", "icepop"]
"""How the gap between trainer and rollout log-probs is corrected; see `importance_weight`."""

CorrectionLevel = Literal["token", "sequence", "geometric"]
"""Whose probability the correction compares; see `correction_log_ratio`."""

Reduction = Literal["token_mean", "sequence_mean", "group_mean", "fixed_length", "sequence_sum"]
"""How per-token values become one number; see `sequence_weights`."""

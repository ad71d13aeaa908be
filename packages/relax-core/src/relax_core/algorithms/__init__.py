"""Algorithms: pure functions on packed tensors, and what each algorithm needs.

The settings and the registry import at once and without torch; the functions when they are first asked for.
"""

from typing import TYPE_CHECKING

from relax_core.algorithms.advantages import generalised_advantages, group_advantages, penalised_scores
from relax_core.algorithms.algorithm import Algorithm, Completions, PolicyTokens
from relax_core.algorithms.clipping import Clipped, clipped_policy_loss, unclipped
from relax_core.algorithms.config import AlgorithmConfig
from relax_core.algorithms.kinds import Correction, KlEstimator, Reduction
from relax_core.algorithms.kl import kl_estimate
from relax_core.algorithms.ratio import bounded_ratio
from relax_core.algorithms.registry import algorithm_names, get_algorithm, register_algorithm
from relax_core.algorithms.sequences import Sequences
from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.algorithms.importance import importance_weight
    from relax_core.algorithms.objective import Objective, Term, policy_objective, sft_objective
    from relax_core.algorithms.reductions import (
        SequenceWeights,
        TokenWeights,
        sequence_weights,
        token_weights,
    )

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Clipped",
    "Completions",
    "Correction",
    "KlEstimator",
    "Objective",
    "PolicyTokens",
    "Reduction",
    "SequenceWeights",
    "Sequences",
    "Term",
    "TokenWeights",
    "algorithm_names",
    "bounded_ratio",
    "clipped_policy_loss",
    "generalised_advantages",
    "get_algorithm",
    "group_advantages",
    "importance_weight",
    "kl_estimate",
    "penalised_scores",
    "policy_objective",
    "register_algorithm",
    "sequence_weights",
    "sft_objective",
    "token_weights",
    "unclipped",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Objective": "objective",
        "SequenceWeights": "reductions",
        "Term": "objective",
        "TokenWeights": "reductions",
        "importance_weight": "importance",
        "policy_objective": "objective",
        "sequence_weights": "reductions",
        "sft_objective": "objective",
        "token_weights": "reductions",
    },
)

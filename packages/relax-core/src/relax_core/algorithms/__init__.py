"""Algorithms: pure functions on packed tensors, and what each algorithm needs.

The settings and the registry import at once and without torch; the functions when they are first asked for.
"""

from typing import TYPE_CHECKING

from relax_core.algorithms.config import AlgorithmConfig
from relax_core.algorithms.kinds import Advantage, Correction, KlEstimator, Reduction
from relax_core.algorithms.registry import Algorithm, algorithm_names, get_algorithm, register_algorithm
from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.algorithms.advantages import group_advantages, penalised_scores
    from relax_core.algorithms.clipping import Clipped, clipped_policy_loss
    from relax_core.algorithms.importance import importance_weight
    from relax_core.algorithms.kl import kl_estimate
    from relax_core.algorithms.objective import Objective, Term, policy_objective, sft_objective
    from relax_core.algorithms.reductions import (
        SequenceWeights,
        TokenWeights,
        sequence_weights,
        token_weights,
    )

__all__ = [
    "Advantage",
    "Algorithm",
    "AlgorithmConfig",
    "Clipped",
    "Correction",
    "KlEstimator",
    "Objective",
    "Reduction",
    "SequenceWeights",
    "Term",
    "TokenWeights",
    "algorithm_names",
    "clipped_policy_loss",
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
]

__getattr__ = lazy_names(
    __name__,
    {
        "Clipped": "clipping",
        "Objective": "objective",
        "SequenceWeights": "reductions",
        "Term": "objective",
        "TokenWeights": "reductions",
        "clipped_policy_loss": "clipping",
        "group_advantages": "advantages",
        "importance_weight": "importance",
        "kl_estimate": "kl",
        "penalised_scores": "advantages",
        "policy_objective": "objective",
        "sequence_weights": "reductions",
        "sft_objective": "objective",
        "token_weights": "reductions",
    },
)

"""The critic's loss on the trainer.

Axes: S scored positions of one micro-batch, T tokens of a batch.
"""

from collections.abc import Mapping, Sequence

import torch
from relax_kernels import LogProbs
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, Sequences
from relax_core.algorithms.builtin.ppo import value_loss
from relax_core.loop.advantages import target_counts, token_columns
from relax_core.loop.objectives import weigh
from relax_core.loss import LossTerm
from relax_core.trainer.objective import Prepared, Terms
from relax_core.trainer.sample import Sample


class ValueObjective:
    """Squared error of values, clipped; reads the columns `value` (before the batch) and `value_target`.

    Args:
        config: the algorithm.
        max_new_tokens: divisor of the fixed_length reduction where the config names none.
    """

    temperature = 1.0
    with_entropy = False
    needs_scores = False

    def __init__(self, config: AlgorithmConfig, *, max_new_tokens: int) -> None:
        self.config = config
        self._fixed_length = config.fixed_length or max_new_tokens

    def prepare(self, samples: Sequence[Sample], logprob_B: Tensor | None = None) -> Prepared:
        """Weights by the algorithm's reduction; diagnostics are means over tokens."""
        weighted, denominator = weigh(self.config, samples, fixed_length=self._fixed_length)
        tokens = float(sum(target_counts(samples)))
        means = dict.fromkeys(("value", "value_clip_fraction"), tokens)
        return Prepared(weighted, {"value_loss": denominator, **means})

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """The value loss."""
        value_S = scored.logprob_T
        found = value_loss(
            value_S, columns_S["value"], columns_S["value_target"], clip=self.config.value_clip
        )
        ones_S = torch.ones_like(value_S)
        return Terms(
            [
                LossTerm("value_loss", found.loss_T, columns_S["weight"]),
                LossTerm("value", value_S, ones_S, coefficient=0),
                LossTerm("value_clip_fraction", found.clipped_T.to(value_S.dtype), ones_S, coefficient=0),
            ]
        )


def explained_variance(samples: Sequence[Sample]) -> float:
    """1 - variance of (target - value) / variance of the target, over a batch; 0 where targets are equal, or
    there is none."""
    columns = token_columns(samples)
    target_T = columns["value_target"]
    if not len(target_T):
        return 0.0
    spread = float(target_T.var(unbiased=False))
    error_T = target_T - columns["value"]
    return 1 - float(error_T.var(unbiased=False)) / spread if spread > 0 else 0.0

"""`TrainingObjective`: what a loss tells the trainer. Algorithms implement it; the trainer knows no formula.

Axes: S scored positions of one micro-batch, B tokens of all samples of a mini-batch, end to end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relax_kernels import LogProbs
from torch import Tensor

from relax_core.algorithms import Sequences
from relax_core.loss import LossTerm
from relax_core.trainer.sample import Sample


@dataclass(frozen=True)
class Prepared:
    """A mini-batch whose weights and global counts are fixed.

    Attributes:
        samples: with the columns that `terms` reads.
        denominators: Z of every loss term.
        batch_columns: float [B] by name, on any device; further columns that `terms` reads.
    """

    samples: Sequence[Sample]
    denominators: Mapping[str, float]
    batch_columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """Loss terms of one micro-batch; `maxima` are scalars of which the step's largest is a metric."""

    terms: Sequence[LossTerm]
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingObjective(Protocol):
    """A loss over scored tokens."""

    @property
    def temperature(self) -> float:
        """Divides the logits, so that the policy trained is the one that was sampled."""
        ...

    @property
    def with_entropy(self) -> bool:
        """Whether `terms` reads the entropy of each position."""
        ...

    @property
    def needs_scores(self) -> bool:
        """Whether `prepare` reads the targets' log-probs under the present weights."""
        ...

    def prepare(self, samples: Sequence[Sample], logprob_B: Tensor | None = None) -> Prepared:
        """Fixes weights and denominators over the whole mini-batch of one optimizer step.

        Args:
            samples: of the mini-batch.
            logprob_B: with `needs_scores`, float32 on the device, 0 where the mask is 0. Reading it would
                make the host wait: what depends on it goes into `Prepared.batch_columns`.
        """
        ...

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """The loss terms of one micro-batch, on every context-parallel rank alike."""
        ...

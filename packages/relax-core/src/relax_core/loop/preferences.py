"""DPO on the trainer: pairs whose members may lie in any micro-batches.

Axes: P pairs, S scored positions of one micro-batch.
"""

from collections.abc import Mapping, Sequence

import torch
from relax_kernels import LogProbs
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, Sequences
from relax_core.algorithms.builtin.dpo import Preference, preference_loss
from relax_core.loss import LossTerm
from relax_core.trainer.objective import Prepared, Terms
from relax_core.trainer.sample import Sample

_METRICS = ("preference_margin", "preference_accuracy")


class PreferenceObjective:
    """DPO. Samples of one group are a pair, the better one first; reads the column `ref_logprob`.

    The loss of a pair couples all its tokens, so it is taken from the log-probs before the step (`logprob`).
    Each micro-batch then only needs the slope: at a token it returns its share of the loss plus slope x
    (log-prob - log-prob without gradient), whose sum over the batch has the loss's value and its gradient.
    """

    temperature = 1.0
    with_entropy = False
    needs_scores = True

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def prepare(self, samples: Sequence[Sample]) -> Prepared:
        """The loss and slope of every pair, over its tokens."""
        found = preferences(samples, beta=self.config.preference_beta)
        prepared = []
        for place, sample in enumerate(samples):
            pair, worse = divmod(place, 2)
            tokens = sum(float((s.mask_L > 0).sum()) for s in samples[2 * pair : 2 * pair + 2])
            values = {
                "share": float(found.loss_P[pair]) / max(1.0, tokens),
                "slope": float(found.slope_P[pair]) * (-1 if worse else 1),
                "preference_margin": float(found.margin_P[pair]) / max(1.0, tokens),
                "preference_accuracy": float(found.margin_P[pair] > 0) / max(1.0, tokens),
            }
            prepared.append(
                sample.with_columns(
                    **{name: torch.full_like(sample.mask_L, value) for name, value in values.items()}
                )
            )
        return Prepared(prepared, dict.fromkeys(("dpo_loss", *_METRICS), len(samples) / 2))

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """The loss of the pairs, with margin and accuracy beside it."""
        logprob_S = scored.logprob_T
        ones_S = torch.ones_like(logprob_S)
        change_S = logprob_S - logprob_S.detach()
        value_S = columns_S["share"] + columns_S["slope"] * change_S
        metrics = [LossTerm(name, columns_S[name], ones_S, coefficient=0) for name in _METRICS]
        return Terms([LossTerm("dpo_loss", value_S, ones_S), *metrics])


def preferences(samples: Sequence[Sample], *, beta: float) -> Preference:
    """Loss and margin of each pair, from the columns `logprob` and `ref_logprob`; float64."""
    groups = [sample.group for sample in samples]
    assert groups[::2] == groups[1::2], "samples come in pairs, the better one first"
    ratio = torch.stack(
        [
            torch.where(
                s.mask_L > 0, s.columns["logprob"].double() - s.columns["ref_logprob"].double(), 0.0
            ).sum()
            for s in samples
        ]
    )
    return preference_loss(ratio[::2], ratio[1::2], beta=beta)

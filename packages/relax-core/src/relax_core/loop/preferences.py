"""DPO on the trainer: pairs whose members may lie in any micro-batches.

Axes: P pairs, N samples, B tokens of all samples end to end, S scored positions of one micro-batch.
"""

from collections.abc import Mapping, Sequence

import torch
from relax_kernels import LogProbs, upload
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, Sequences
from relax_core.algorithms.builtin.dpo import Preference, preference_loss
from relax_core.loop.advantages import target_counts
from relax_core.loss import LossTerm
from relax_core.trainer.objective import Prepared, Terms
from relax_core.trainer.sample import Sample

_METRICS = ("preference_margin", "preference_accuracy")


class PreferenceObjective:
    """DPO. Samples of one group are a pair, the better one first; reads the column `ref_logprob`.

    The loss of a pair couples all its tokens, so it is taken from the log-probs before the step.
    Each micro-batch then only needs the slope: at a token it returns its share of the loss plus slope x
    (log-prob - log-prob without gradient), whose sum over the batch has the loss's value and its gradient.
    """

    temperature = 1.0
    with_entropy = False
    needs_scores = True

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def prepare(self, samples: Sequence[Sample], logprob_B: Tensor | None = None) -> Prepared:
        """The loss and slope of every pair, over its tokens."""
        assert logprob_B is not None, "the pairs' losses come from scores"
        found = preferences(samples, logprob_B, beta=self.config.preference_beta)
        device = logprob_B.device
        counts_N = torch.tensor(target_counts(samples), dtype=torch.float64)
        tokens_P = upload((counts_N[::2] + counts_N[1::2]).clamp(min=1), device)
        sample_B = upload(_owners(samples), device)
        shares_P = {
            "share": found.loss_P / tokens_P,
            "preference_margin": found.margin_P / tokens_P,
            "preference_accuracy": (found.margin_P > 0) / tokens_P,
        }
        values_P2 = {name: torch.stack([share_P, share_P], 1) for name, share_P in shares_P.items()}
        values_P2["slope"] = torch.stack([found.slope_P, -found.slope_P], 1)
        return Prepared(
            samples,
            dict.fromkeys(("dpo_loss", *_METRICS), len(samples) / 2),
            {name: value_P2.flatten()[sample_B].float() for name, value_P2 in values_P2.items()},
        )

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """The loss of the pairs, with margin and accuracy beside it."""
        logprob_S = scored.logprob_T
        ones_S = torch.ones_like(logprob_S)
        change_S = logprob_S - logprob_S.detach()
        value_S = columns_S["share"] + columns_S["slope"] * change_S
        metrics = [LossTerm(name, columns_S[name], ones_S, coefficient=0) for name in _METRICS]
        return Terms([LossTerm("dpo_loss", value_S, ones_S), *metrics])


def preferences(samples: Sequence[Sample], logprob_B: Tensor, *, beta: float) -> Preference:
    """Loss and margin of each pair, from the policy's log-probs and the column `ref_logprob`.

    Returns:
        float64, on the device of the log-probs.
    """
    groups = [sample.group for sample in samples]
    assert groups[::2] == groups[1::2], "samples come in pairs, the better one first"
    mask_B, ref_B = (
        upload(torch.cat(columns), logprob_B.device)
        for columns in ([s.mask_L > 0 for s in samples], [s.columns["ref_logprob"] for s in samples])
    )
    ratio_B = torch.where(mask_B, logprob_B.double() - ref_B.double(), 0.0)
    ratio_N = torch.stack([part.sum() for part in torch.split(ratio_B, [len(s.mask_L) for s in samples])])
    return preference_loss(ratio_N[::2], ratio_N[1::2], beta=beta)


def _owners(samples: Sequence[Sample]) -> Tensor:
    """Which sample each token belongs to: int64 [B] on the host."""
    return torch.arange(len(samples)).repeat_interleave(torch.tensor([len(s.mask_L) for s in samples]))

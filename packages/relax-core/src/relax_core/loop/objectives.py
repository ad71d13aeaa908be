"""The algorithms' formulas as objectives of the trainer.

Axes: T targets of a whole mini-batch, B tokens of all its samples end to end, S scored positions of one
micro-batch.
"""

from collections.abc import Mapping, Sequence

import torch
from relax_kernels import LogProbs, upload
from torch import Tensor

from relax_core.algorithms import (
    AlgorithmConfig,
    Objective,
    Sequences,
    policy_objective,
    sequence_weights,
    sft_objective,
)
from relax_core.loop.advantages import target_counts, target_places, token_columns
from relax_core.loss import LossTerm
from relax_core.trainer.objective import Prepared, Terms
from relax_core.trainer.sample import Sample


class PolicyObjective:
    """Policy gradients on sampled completions.

    Reads the columns `advantage` and `rollout_logprob`, `old_logprob` unless `on_policy` or the algorithm
    compares with the engine, and `ref_logprob` where it has a KL loss.

    Args:
        config: the algorithm.
        temperature: of sampling.
        max_new_tokens: divisor of the fixed_length reduction where the config names none.
        on_policy: the first optimizer step of a batch: the weights trained are those that scored it, so that
            the old log-probs are the present ones.
    """

    with_entropy = True

    def __init__(
        self, config: AlgorithmConfig, *, temperature: float, max_new_tokens: int, on_policy: bool
    ) -> None:
        self.config = config
        self.temperature = temperature
        self._fixed_length = config.fixed_length or max_new_tokens
        self._on_policy = on_policy

    def prepare(self, samples: Sequence[Sample], logprob_B: Tensor | None = None) -> Prepared:
        """Weights by the algorithm's reduction; diagnostics are means over tokens."""
        weighted, denominator = weigh(self.config, samples, fixed_length=self._fixed_length)
        tokens = float(sum(target_counts(samples)))
        names = ["policy", "entropy", *(["kl"] if self.config.kl_loss_coef > 0 else [])]
        return Prepared(
            weighted,
            {**{f"{name}_loss": denominator for name in names}, **dict.fromkeys(self._diagnostics, tokens)},
            _batch_columns(self.config, samples, logprob_B),
        )

    @property
    def needs_scores(self) -> bool:
        """As the algorithm says."""
        return self.config.algorithm.needs_scores

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """Importance weight x policy loss, KL and entropy."""
        objective = policy_objective(
            self.config,
            logprob_T=scored.logprob_T,
            old_logprob_T=self._old(scored, columns_S),
            rollout_logprob_T=columns_S["rollout_logprob"],
            ref_logprob_T=columns_S["ref_logprob"] if self.config.kl_loss_coef > 0 else None,
            advantage_T=columns_S["advantage"],
            entropy_T=scored.entropy_T,
            mask_T=torch.ones_like(scored.logprob_T, dtype=torch.bool),
            sequences=sequences,
            columns=columns_S,
        )
        terms = _loss_terms(objective, columns_S["weight"])
        ones_S = torch.ones_like(scored.logprob_T)
        terms += [
            LossTerm(name, value_S, ones_S, coefficient=0) for name, value_S in objective.diagnostics.items()
        ]
        gap_S = objective.diagnostics["logprob_gap"]
        return Terms(terms, {"logprob_gap": gap_S.max() if len(gap_S) else gap_S.sum()})

    def _old(self, scored: LogProbs, columns_S: Mapping[str, Tensor]) -> Tensor:
        if self.config.algorithm.ratio_to == "rollout":
            return columns_S["rollout_logprob"]
        return scored.logprob_T.detach() if self._on_policy else columns_S["old_logprob"]

    @property
    def _diagnostics(self) -> tuple[str, ...]:
        names = ("ratio", "clip_fraction", "dual_clip_fraction", "policy_kl", "importance_weight")
        gap = ("logprob_gap", "rollout_kl", "correction_fraction", "entropy")
        return (*names, *gap, *(("kl",) if self.config.kl_loss_coef > 0 else ()))


class SftObjective:
    """Negative log-likelihood of the tokens that carry loss."""

    temperature = 1.0
    with_entropy = False
    needs_scores = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def prepare(self, samples: Sequence[Sample], logprob_B: Tensor | None = None) -> Prepared:
        """Weights by the algorithm's reduction."""
        weighted, denominator = weigh(self.config, samples)
        return Prepared(weighted, {"sft_loss": denominator})

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        """The negative log-likelihood."""
        mask_S = torch.ones_like(scored.logprob_T, dtype=torch.bool)
        return Terms(
            _loss_terms(sft_objective(logprob_T=scored.logprob_T, mask_T=mask_S), columns_S["weight"])
        )


def weigh(
    config: AlgorithmConfig, samples: Sequence[Sample], *, fixed_length: int | None = None
) -> tuple[list[Sample], float]:
    """Gives each sample a column `weight`, and the global denominator of a mini-batch.

    Returns:
        (samples, Z) of the reduction in use; see `sequence_weights`.
    """
    weights = sequence_weights(
        config.token_reduction,
        target_counts(samples),
        [sample.group for sample in samples],
        fixed_length=fixed_length,
    )
    weighted = [
        sample.with_columns(weight=sample.mask_L * weight)
        for sample, weight in zip(samples, weights.weights, strict=True)
    ]
    return weighted, weights.denominator


def _batch_columns(
    config: AlgorithmConfig, samples: Sequence[Sample], logprob_B: Tensor | None
) -> dict[str, Tensor]:
    """The columns that the algorithm makes from a whole mini-batch: float32 [B], 0 at tokens that are no
    targets, on the device of the present log-probs if it reads them."""
    make = config.algorithm.batch_columns
    if make is None:
        return {}
    device = torch.device("cpu") if logprob_B is None else logprob_B.device
    places_T = upload(target_places(samples), device)
    columns = {name: upload(column_T, device) for name, column_T in token_columns(samples).items()}
    if logprob_B is not None:
        columns["logprob"] = logprob_B[places_T].double()
    total = sum(len(sample.tokens_L) for sample in samples)
    return {
        name: torch.zeros(total, device=device).index_copy(0, places_T, column_T.float())
        for name, column_T in make(columns, config).items()
    }


def _loss_terms(objective: Objective, weight_S: Tensor) -> list[LossTerm]:
    return [
        LossTerm(f"{name}_loss", term.value_T, weight_S, term.coefficient)
        for name, term in objective.terms.items()
    ]

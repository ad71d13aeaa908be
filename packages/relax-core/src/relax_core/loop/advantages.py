"""Samples with their log-probs become samples with advantages.

Axes: N completions, T tokens of all completions back to back, L tokens of one sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, Completions
from relax_core.trainer.sample import Sample


def with_advantages(
    samples: Sequence[Sample], scores: Sequence[float], config: AlgorithmConfig
) -> list[Sample]:
    """Gives each sample a column `advantage` as the algorithm says, from the scores and the other columns.

    Advantages are computed in float64 over the whole batch, before it is split.
    """
    algorithm = config.algorithm
    assert algorithm.advantage is not None, "the algorithm takes no scores"
    advantage_T = algorithm.advantage(completions(samples, scores), config)
    parts = split_tokens(advantage_T, samples)
    return [
        sample.with_columns(advantage=spread(sample, part))
        for sample, part in zip(samples, parts, strict=True)
    ]


def with_value_targets(
    samples: Sequence[Sample], scores: Sequence[float], config: AlgorithmConfig
) -> list[Sample]:
    """Gives each sample a column `value_target`, what the critic should have said."""
    target = config.algorithm.value_target
    assert target is not None, "the algorithm has no critic"
    parts = split_tokens(target(completions(samples, scores), config), samples)
    return [
        sample.with_columns(value_target=spread(sample, part))
        for sample, part in zip(samples, parts, strict=True)
    ]


def completions(samples: Sequence[Sample], scores: Sequence[float]) -> Completions:
    """The targets of samples back to back, without prompts and padding."""
    return Completions(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor([sample.group for sample in samples]),
        torch.arange(len(samples)).repeat_interleave(torch.tensor(target_counts(samples))),
        token_columns(samples),
    )


def token_columns(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The columns of the targets of samples back to back: float64 [T] by name."""
    return {
        name: torch.cat([sample.columns[name][sample.mask_L > 0] for sample in samples]).double()
        for name in samples[0].columns
    }


def target_places(samples: Sequence[Sample]) -> Tensor:
    """Where the targets of samples lie when all their tokens are laid end to end: int64 [T]."""
    return torch.cat([sample.mask_L > 0 for sample in samples]).nonzero().squeeze(1)


def split_tokens(value_T: Tensor, samples: Sequence[Sample]) -> tuple[Tensor, ...]:
    """Values of the targets of samples, by sample."""
    return torch.split(value_T, target_counts(samples))


def spread(sample: Sample, value_T: Tensor) -> Tensor:
    """Values of a sample's targets at their places: float32 [L], 0 elsewhere."""
    placed_L = torch.zeros_like(sample.mask_L)
    placed_L[sample.mask_L > 0] = value_T.float()
    return placed_L


def target_counts(samples: Sequence[Sample]) -> list[int]:
    """How many targets each sample has."""
    return [int((sample.mask_L > 0).sum()) for sample in samples]


def mean_advantages(samples: Sequence[Sample]) -> list[float]:
    """The mean advantage of each sample's targets, for people."""
    return [
        float(sample.columns["advantage"][sample.mask_L > 0].double().mean())
        if bool(sample.mask_L.any())
        else 0.0
        for sample in samples
    ]

"""What one optimizer step measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepMetrics:
    """The same on every rank.

    Attributes:
        values: global means of every loss term, maxima, `loss`, `grad_norm`, `lr`, and per draft depth
            `mtp_loss_<k>` and `mtp_acceptance_<k>`; with experts, what `LoadBalance.metrics` says.
        tokens: tokens trained on, prompts included.
        flops: floating-point operations of the forward and backward passes of the whole mini-batch, as the
            model needs them: two for each multiplication of `sample_cost`, three passes' worth, nothing for
            what is computed again.
    """

    values: dict[str, float]
    tokens: int
    flops: float = 0.0

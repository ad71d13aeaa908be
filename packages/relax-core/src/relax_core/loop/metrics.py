"""Turns what the trainer measured into the metrics of a step."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from relax_core.trainer.step_metrics import StepMetrics


class LateMetrics:
    """`training_metrics` of optimizer steps that the device may not have finished.

    Args:
        steps: of one batch, in order.
    """

    def __init__(self, steps: Sequence[StepMetrics]) -> None:
        self._steps = steps

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(step.ready for step in self._steps)

    def read(self) -> dict[str, float]:
        """Metrics by name."""
        return training_metrics(self._steps)


def training_metrics(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps; names as in `relax_core.run.metrics`.

    Means over the optimizer steps, except the largest of maxima and the last learning rate. Draft depths are
    averaged as `mtp_loss` and `mtp_acceptance`, and kept apart as well where there are several.
    """
    merged = {name: _merge(name, [step.values[name] for step in steps]) for name in steps[0].values}
    if "logprob_gap" in merged:
        merged["logprob_gap_mean"] = merged.pop("logprob_gap")
    for name in ("mtp_loss", "mtp_acceptance"):
        merged |= _over_depths(name, merged)
    if "mtp_loss_1" not in merged:
        merged = {
            name: value for name, value in merged.items() if name not in ("mtp_loss_0", "mtp_acceptance_0")
        }
    return {
        **merged,
        "train_tokens": sum(step.tokens for step in steps),
        "train_flops": sum(step.flops for step in steps),
    }


def _merge(name: str, values: Sequence[float]) -> float:
    if name == "lr":
        return values[-1]
    return max(values) if name.endswith("_max") else fmean(values)


def _over_depths(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    values = [value for key, value in metrics.items() if key.startswith(f"{name}_")]
    return {name: fmean(values)} if values else {}

"""How far trainer and engine may disagree on the log-probs of the tokens that the engine drew."""

from collections.abc import Mapping

from relax_core.loop.config import RolloutConfig


class LogProbGapError(ValueError):
    """Trainer and engine disagree on log-probs by more than the run allows."""


def check_gap(step: int, metrics: Mapping[str, float], config: RolloutConfig) -> None:
    """Compares a step's gap with the bounds that stop a run; NaN is above all of them.

    `relax_core.run.alerts` warns past `rollout.warn_logprob_gap`.

    Args:
        step: that was trained.
        metrics: `logprob_gap_mean`, `logprob_gap_max` and `rollout_kl` of it, in nats.
        config: with the bounds.

    Raises:
        LogProbGapError: past a bound at which the run stops.
    """
    for name, what in (
        ("max_logprob_gap", "log-probs of trainer and engine differ by {:.4g} nats on average"),
        ("max_logprob_gap_of_token", "log-probs of trainer and engine differ by {:.4g} nats at one token"),
        ("max_rollout_kl", "the engine's distribution is {:.4g} nats from the trainer's"),
    ):
        bound, value = getattr(config, name), metrics[_METRIC[name]]
        if bound is not None and not value <= bound:
            raise LogProbGapError(
                f"step {step}: {what.format(value)}, above rollout.{name} = {bound:g}. Compare precision "
                "and kernels of both sides; the last checkpoint is from before this step."
            )


_METRIC = {
    "max_logprob_gap": "logprob_gap_mean",
    "max_logprob_gap_of_token": "logprob_gap_max",
    "max_rollout_kl": "rollout_kl",
}

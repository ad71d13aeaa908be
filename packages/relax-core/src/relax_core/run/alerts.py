"""Alerts: what a step's metrics say is going wrong, and what to do about it.

A check is a pure function of the steps so far; `CHECKS` is the registry. An alert is raised at the step at
which its check begins to hold, and again only once it has ceased to, so that a run that goes on from a
checkpoint raises what an uninterrupted one does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from relax_core.config.section import Section, setting

if TYPE_CHECKING:
    from relax_core.config.root import RelaxConfig

Steps = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`, ascending, without step 0."""


class AlertConfig(Section):
    """When a run warns; the bound of the log-prob gap is `rollout.warn_logprob_gap`."""

    not_finite: bool = setting(True, "Warns when a metric of a step is NaN or infinite.")
    window: int = setting(5, "Steps that are averaged before they are compared.", unit="steps", ge=1, le=1000)
    entropy_fraction: float | None = setting(
        0.1,
        "Warns when the entropy falls below this share of the first steps', unless nine in ten completions "
        "are correct; null is off.",
        gt=0,
        lt=1,
    )
    length_growth: float | None = setting(
        3.0, "Warns when completions grow to this many times the first steps' length; null is off.", gt=1
    )
    truncated_fraction: float | None = setting(
        0.5, "Warns when more than this share of completions is cut; null is off.", gt=0, lt=1
    )
    stuck_steps: int | None = setting(
        20,
        "Warns when for so many steps the reward was one and the same, or no group's completions differed "
        "in it; null is off.",
        unit="steps",
        ge=2,
        le=100_000,
    )


@dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        name: its check's name in `CHECKS`.
        message: what was seen, with the bound.
        advice: what to do.
    """

    name: str
    message: str
    advice: str


@dataclass(frozen=True)
class Check:
    """What can go wrong.

    Attributes:
        seen: what is wrong after the last of some steps, in words; None if nothing is.
        advice: what to do.
    """

    seen: Callable[[Steps, "RelaxConfig"], str | None]
    advice: str


def _not_finite(steps: Steps, config: "RelaxConfig") -> str | None:
    if not config.alerts.not_finite:
        return None
    wrong = [name for name, value in steps[-1].items() if name != "time" and not math.isfinite(float(value))]
    return f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite" if wrong else None


def _gap(steps: Steps, config: "RelaxConfig") -> str | None:
    bound, gap = config.rollout.warn_logprob_gap, steps[-1].get("logprob_gap_mean")
    # NaN is above every bound.
    if bound is None or gap is None or float(gap) <= bound:
        return None
    return (
        f"log-probs of trainer and engine differ by {float(gap):.4g} nats on average, above "
        f"rollout.warn_logprob_gap = {bound:g}"
    )


def _entropy(steps: Steps, config: "RelaxConfig") -> str | None:
    fraction, window = config.alerts.entropy_fraction, config.alerts.window
    ends = _first_and_last(steps, "entropy", window)
    if fraction is None or ends is None:
        return None
    first, last = ends
    accuracy = _values(steps[-window:], "accuracy")
    if first <= 0 or not last < fraction * first or (accuracy and fmean(accuracy) >= 0.9):
        return None
    return (
        f"entropy is {last:.3g} nats, less than {fraction:g} (alerts.entropy_fraction) of the {first:.3g} "
        "nats of the first steps"
    )


def _length(steps: Steps, config: "RelaxConfig") -> str | None:
    growth = config.alerts.length_growth
    ends = _first_and_last(steps, "response_length_mean", config.alerts.window)
    if growth is None or ends is None or not ends[1] > growth * ends[0]:
        return None
    return (
        f"completions have {ends[1]:.4g} tokens on average, more than {growth:g} (alerts.length_growth) "
        f"times the {ends[0]:.4g} of the first steps"
    )


def _truncated(steps: Steps, config: "RelaxConfig") -> str | None:
    bound, window = config.alerts.truncated_fraction, config.alerts.window
    cut = _values(steps[-window:], "truncated_fraction")
    if bound is None or len(cut) < window or not fmean(cut) > bound:
        return None
    return (
        f"{100 * fmean(cut):.3g} % of completions are cut at a limit, more than "
        f"alerts.truncated_fraction = {bound:g}"
    )


def _stuck(steps: Steps, config: "RelaxConfig") -> str | None:
    count = config.alerts.stuck_steps
    if count is None or len(steps) < count:
        return None
    rewards = _values(steps[-count:], "reward")
    if len(rewards) == count and max(rewards) == min(rewards):
        return f"the reward has been {rewards[-1]:.4g} for {count} steps (alerts.stuck_steps)"
    spreads = _values(steps[-count:], "reward_std")
    grouped = config.rollout.samples_per_prompt > 1
    if grouped and len(spreads) == count and max(spreads) == 0:
        return f"for {count} steps (alerts.stuck_steps) no group's completions differed in reward"
    return None


CHECKS: Mapping[str, Check] = {
    "not_finite": Check(
        _not_finite,
        "Lower trainer.lr, set trainer.clip_grad to 1, and look at the reward if it is the reward; the last "
        "checkpoint is from before this step",
    ),
    "logprob_gap": Check(_gap, "Compare precision and kernels of both sides"),
    "entropy_collapse": Check(
        _entropy,
        "Raise algorithm.entropy_coef or algorithm.clip_high, or lower trainer.lr, and go on from a "
        "checkpoint from before the fall",
    ),
    "length_blow_up": Check(
        _length,
        "Read the longest of samples.jsonl: if they repeat themselves, set reward.overlong_penalty and "
        "algorithm.reduction, and see that stop tokens are drawn",
    ),
    "truncated": Check(
        _truncated, "Raise rollout.max_new_tokens, or set reward.overlong_penalty so that length costs"
    ),
    "reward_stuck": Check(
        _stuck,
        "Read samples.jsonl: either the reward cannot tell completions apart (does it find the answer?), or "
        "the prompts are all too hard or too easy (rollout.dynamic_sampling leaves such groups out)",
    ),
}


def raised(history: Steps, config: "RelaxConfig") -> list[Alert]:
    """The alerts of the last step.

    Args:
        history: lines of `metrics.jsonl`; step 0, the evaluation before training, raises nothing.
        config: with the bounds.

    Returns:
        An alert for each check that holds after the last step and did not after the one before.
    """
    if not history or history[-1]["step"] == 0:
        return []
    steps = history[1:] if history[0]["step"] == 0 else history
    alerts = []
    for name, check in CHECKS.items():
        message = check.seen(steps, config)
        if message and not (len(steps) > 1 and check.seen(steps[:-1], config)):
            alerts.append(Alert(name, message, check.advice))
    return alerts


def _values(steps: Steps, name: str) -> list[float]:
    return [float(step[name]) for step in steps if name in step]


def _first_and_last(steps: Steps, name: str, window: int) -> tuple[float, float] | None:
    """Means over the first and the last `window` steps; None while they overlap."""
    first, last = _values(steps[:window], name), _values(steps[-window:], name)
    if len(steps) < 2 * window or len(first) < window or len(last) < window:
        return None
    return fmean(first), fmean(last)

"""The outcome of a run in one small object, computed from its metrics alone."""

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = (
    "relax-core",
    "relax-bridge",
    "relax-kernels",
    "relax-rollout",
    "relax-npu",
    "torch",
    "torch-npu",
    "megatron-core",
    "transformers",
    "sglang",
    "ray",
)


def installed_versions() -> dict[str, str]:
    """Python's version and those of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def summarize(
    records: Sequence[Mapping[str, Any]], *, seed: int, wall_s: float, peak_rss_gib: float
) -> dict[str, Any]:
    """Computes `summary.json`.

    Args:
        records: the lines of `metrics.jsonl`, step 0 (evaluation before training) included if there is one.
        seed: the run's seed.
        wall_s: seconds from the start of the process to now, earlier parts of a resumed run added.
        peak_rss_gib: largest resident memory of this process so far.

    Returns:
        eval_metric: what evaluations gave: `accuracy`, else `reward`, else `loss`, None without evaluation.
        eval_before, eval_after: that at step 0 and at the last step, None where not evaluated.
        reward_first, reward_last: mean reward of the first and last tenth of steps, at least one step.
        steps, wall_s, seed, versions.
        train_tokens_per_s: tokens per second of the phases `logprob` and `train`.
        rollout_tokens_per_s: tokens per second of the phase `rollout`.
        update_exposed_s: seconds of a step, on average, in which a weight update kept trainer and engine from
            all else.
        peak_rss_gib: the largest of any part of the run.
        logprob_gap_max: over all steps.
    """
    steps = [record for record in records if record["step"] > 0]
    rewards = [record["reward"] for record in steps if "reward" in record]
    evaluated = {name for record in records for name in record}
    metric = next((name for name in ("accuracy", "reward", "loss") if f"eval_{name}" in evaluated), None)
    tenth = max(1, round(len(rewards) / 10))
    return {
        "eval_metric": metric,
        "eval_before": records[0].get(f"eval_{metric}") if records and records[0]["step"] == 0 else None,
        "eval_after": steps[-1].get(f"eval_{metric}") if steps else None,
        "reward_first": _mean(rewards[:tenth]),
        "reward_last": _mean(rewards[-tenth:]),
        "steps": steps[-1]["step"] if steps else 0,
        "wall_s": wall_s,
        "train_tokens_per_s": _rate(steps, "train_tokens", ("logprob", "train")),
        "rollout_tokens_per_s": _rate(steps, "rollout_tokens", ("rollout",)),
        "update_exposed_s": _mean(_times(steps, "update_exposed")),
        "peak_rss_gib": max([peak_rss_gib, *_times(records, "peak_rss_gib")]),
        "logprob_gap_max": max(_numbers(steps, "logprob_gap_max"), default=None),
        "seed": seed,
        "versions": installed_versions(),
    }


def _numbers(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = [float(record[name]) for record in records if name in record]
    # max() would skip over NaN or not, depending on its place.
    return [math.nan] if any(math.isnan(value) for value in values) else values


def _times(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [record["time"][name] for record in records if name in record.get("time", {})]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(map(float, values)) / len(values) if values else None


def _rate(steps: Sequence[Mapping[str, Any]], name: str, phases: Sequence[str]) -> float | None:
    tokens = sum(record.get(name, 0) for record in steps)
    spent = [record.get("time", {}).get("phases", {}) for record in steps]
    seconds = math.fsum(each.get(phase, 0.0) for each in spent for phase in phases)
    return tokens / seconds if seconds > 0 else None

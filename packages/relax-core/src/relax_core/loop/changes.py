"""Which settings may change when a run goes on: any other would make it another run than it was."""

from collections.abc import Iterator, Mapping
from typing import Any

from relax_core.run.alerts import AlertConfig

RESUMABLE = (
    "run.steps",
    "run.progress",
    "run.log_level",
    "run.trace",
    "run.profile_from",
    "run.profile_steps",
    "run.memory_from",
    "run.memory_steps",
    "run.memory_snapshot",
    "run.trackers",
    "run.tracker_project",
    "run.prometheus_host",
    "run.prometheus_port",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.asynchronous",
    *(f"alerts.{name}" for name in AlertConfig.model_fields),
)
"""Settings that may be given when a run is resumed."""

_MOVABLE = ("run.name", "run.dir", "model.path", "model.reference_path", "data.path", "data.eval_path")
"""Places, which change where files are moved; what lies there is compared when it is read."""


class ChangedSettingsError(ValueError):
    """The settings are not those of the run so far."""


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Compares the settings of a checkpoint with those it is to go on with.

    Args:
        before: sections of plain values; settings that it lacks are newer than the checkpoint.
        now: likewise.
        where: the file that holds `now`.

    Raises:
        ChangedSettingsError: naming each setting that differs, with both values.
    """
    changed = [
        f"{name}: {old!r} is now {new!r}"
        for name, old, new in _both(before, now)
        if old != new and name not in RESUMABLE and name not in _MOVABLE
    ]
    if changed:
        raise ChangedSettingsError(
            f"{where} has changed since the checkpoint was written, and the run would not be the same:\n  "
            + "\n  ".join(changed)
            + f"\nPut it back, or start a new run. Allowed to change: {', '.join((*RESUMABLE, *_MOVABLE))}"
        )


def _both(
    before: Mapping[str, Any], now: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and not at:
            yield from _both(old, new, (name,))
        else:
            yield ".".join((*at, name)), old, new

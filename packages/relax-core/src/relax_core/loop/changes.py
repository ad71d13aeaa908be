"""Which settings may change when a run goes on: any other would make it another run than it was."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from relax_core.device.parallel import ParallelConfig
from relax_core.run.alerts import AlertConfig

_log = logging.getLogger(__name__)

LAYOUT = (
    *(f"parallel.{name}" for name in ParallelConfig.model_fields),
    "cluster.mode",
    "cluster.trainer_ranks",
    "trainer.micro_batch_tokens",
    "trainer.recompute",
    "trainer.overlap_grad_reduce",
    "trainer.overlap_param_gather",
)
"""Settings that say where and in which order the same numbers are computed."""

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
    "data.workers",
    "data.batches_ahead",
    *(f"alerts.{name}" for name in AlertConfig.model_fields),
    *LAYOUT,
)
"""Settings that may be given when a run is resumed."""

_MOVABLE = (
    "run.name",
    "run.dir",
    "model.path",
    "model.reference_path",
    "data.path",
    "data.eval_path",
    "data.images_root",
    "data.image_cache",
)
"""Places, which change where files are moved; what lies there is compared when it is read."""


class ChangedSettingsError(ValueError):
    """The settings are not those of the run so far."""


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Compares the settings of a checkpoint with those it is to go on with; says it if the layout is another.

    Args:
        before: sections of plain values; settings that it lacks are newer than the checkpoint.
        now: likewise.
        where: the file that holds `now`.

    Raises:
        ChangedSettingsError: naming each setting that differs, with both values.
    """
    differing = {
        name: f"{name}: {old!r} is now {new!r}" for name, old, new in _both(before, now) if old != new
    }
    moved = [text for name, text in differing.items() if name in LAYOUT]
    if moved:
        _log.warning(
            "the run goes on in another layout, equal to rounding and not to the bit: %s", "; ".join(moved)
        )
    changed = [text for name, text in differing.items() if name not in (*RESUMABLE, *_MOVABLE)]
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

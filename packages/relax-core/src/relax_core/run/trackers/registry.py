"""Which trackers there are: those of this package by name, further ones by entry point."""

import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import NamedTuple

from relax_core.run.config import RunConfig
from relax_core.run.trackers.tracker import TrackedRun, Tracker

GROUP = "relax_core.trackers"
"""Entry points of this group are called with a `TrackedRun` and give a `Tracker`."""


class _BuiltIn(NamedTuple):
    """A class, and the package that it needs, which the extra of the tracker's name installs."""

    path: str
    needs: str


_BUILT_IN = {
    "wandb": _BuiltIn("relax_core.run.trackers.wandb:WandbTracker", "wandb"),
    "clearml": _BuiltIn("relax_core.run.trackers.clearml:ClearmlTracker", "clearml"),
    "prometheus": _BuiltIn("relax_core.run.trackers.prometheus:PrometheusTracker", "prometheus_client"),
}


def wanted_trackers(settings: RunConfig) -> tuple[str, ...]:
    """The trackers that the settings name, and W&B where the environment has its key."""
    by_key = ("wandb",) if os.environ.get("WANDB_API_KEY") else ()
    return tuple(dict.fromkeys((*settings.trackers, *by_key)))


def missing_package(name: str) -> str | None:
    """What is to be installed before a tracker can be opened, in words; None if nothing is."""
    if name not in _BUILT_IN or _is_there(_BUILT_IN[name].needs):
        return None
    return (
        f"the tracker {name} needs the package {_BUILT_IN[name].needs}, which is not installed: "
        f"pip install 'relax-core[{name}]'"
    )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """A tracker by its name.

    Raises:
        ValueError: there is none of that name, or its package is not installed.
    """
    missing = missing_package(name)
    if missing is not None:
        raise ValueError(missing)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    found |= {known: EntryPoint(known, built_in.path, GROUP) for known, built_in in _BUILT_IN.items()}
    if name not in found:
        raise ValueError(f"there is no tracker {name!r}; there is {', '.join(sorted(found))}")
    factory: Callable[[TrackedRun], Tracker] = found[name].load()
    return factory(run)


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    # A module that was made by hand has no spec.
    except ValueError:
        return True

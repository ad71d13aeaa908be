"""What a tracker is, and the names under which it is given numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_core.run.config import RunConfig
from relax_core.run.metrics import describe


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        ...

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is opened for.

    Attributes:
        folder: the run directory, whose name is the run's.
        config: the resolved config as plain values, secrets masked.
        settings: of the run, the trackers' among them.
        resumed: whether the run goes on.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: RunConfig
    resumed: bool


def tagged(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by `group/name`; unknown metrics go to `other/`, times to `time/`."""
    numbers = {
        f"{describe(name).group.replace(' ', '_')}/{name}": float(value)
        for name, value in record.items()
        if name not in ("step", "time")
    }
    times = dict(record.get("time", {}))
    times |= times.pop("phases", {})
    return numbers | {f"time/{name}": float(value) for name, value in times.items()}

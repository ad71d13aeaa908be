"""Reads what a run has left behind so far, be it finished, running or dead."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.yaml_text import YamlError, parse_yaml
from relax_core.run.files import RunDirectoryError
from relax_core.run.jsonl import read_jsonl

logger = logging.getLogger(__name__)


class ReportError(ValueError):
    """A run that no report can be made of; the message names the file and the cure."""


@dataclass(frozen=True)
class RunData:
    """One run for the page.

    Attributes:
        label: its name, unique among the runs of a report.
        metrics: the lines of `metrics.jsonl`, steps ascending.
        samples: the lines of `samples.jsonl`.
        alerts: the lines of `alerts.jsonl`; runs of before there were alerts have none.
        summary: `summary.json`, empty while the run is not finished.
        config: `config.yaml`, empty if it is missing.
    """

    label: str
    metrics: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]] = ()
    alerts: Sequence[dict[str, Any]] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def read_run(path: Path, *, label: str | None = None) -> RunData:
    """Reads a run directory.

    A last line that is cut is left out with a warning: the run may be writing it right now.

    Args:
        path: the run directory.
        label: its name in the report; the folder's name if None.

    Raises:
        ReportError: there is no run, it has no step yet, or a file is damaged.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is no folder: give the run directory that relax-train printed")
    metrics = _lines(path / "metrics.jsonl")
    if not (path / "metrics.jsonl").exists():
        raise ReportError(f"{path} has no metrics.jsonl: it is no run directory, or its run never began")
    if not metrics:
        raise ReportError(f"{path / 'metrics.jsonl'} has no finished step yet: try again later")
    for number, record in enumerate(metrics, start=1):
        if not isinstance(record.get("step"), int):
            raise ReportError(f"{path / 'metrics.jsonl'}, line {number}: `step` is missing or no integer")
    return RunData(
        label=label or path.resolve().name,
        metrics=metrics,
        samples=_lines(path / "samples.jsonl"),
        alerts=_lines(path / "alerts.jsonl"),
        summary=_summary(path / "summary.json"),
        config=_config(path / "config.yaml"),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        records = read_jsonl(path)
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):
            logger.warning("%s: the last line is cut and left out", path)
    except RunDirectoryError as error:
        raise ReportError(f"the file is damaged: {error}") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    return records


def _summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    if not isinstance(summary, dict):
        raise ReportError(f"{path} is damaged: it holds no JSON object")
    return summary


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))[0]
    except (OSError, UnicodeDecodeError, YamlError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart: `run`, or `a/run` and `b/run`."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-count:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise ReportError("the same run directory is given twice")

"""A run: its directory, its records, and what a person sees of it.

`relax-train --help` reads `RunConfig`, so the rest loads when it is first asked for.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names
from relax_core.run.config import RunConfig

if TYPE_CHECKING:
    from relax_core.run.directory import RunDirectory
    from relax_core.run.files import RunDirectoryError, write_atomic
    from relax_core.run.jsonl import JsonlWriter, read_jsonl
    from relax_core.run.logs import logging_to
    from relax_core.run.metrics import METRICS, PHASES, Metric, describe
    from relax_core.run.recorder import Recorder
    from relax_core.run.secrets import Masker, MaskingFormatter
    from relax_core.run.summary import installed_versions, summarize
    from relax_core.run.timer import PhaseTimer

__all__ = [
    "METRICS",
    "PHASES",
    "JsonlWriter",
    "Masker",
    "MaskingFormatter",
    "Metric",
    "PhaseTimer",
    "Recorder",
    "RunConfig",
    "RunDirectory",
    "RunDirectoryError",
    "describe",
    "installed_versions",
    "logging_to",
    "read_jsonl",
    "summarize",
    "write_atomic",
]

__getattr__ = lazy_names(
    __name__,
    {
        "METRICS": "metrics",
        "PHASES": "metrics",
        "JsonlWriter": "jsonl",
        "Masker": "secrets",
        "MaskingFormatter": "secrets",
        "Metric": "metrics",
        "PhaseTimer": "timer",
        "Recorder": "recorder",
        "RunDirectory": "directory",
        "RunDirectoryError": "files",
        "describe": "metrics",
        "installed_versions": "summary",
        "logging_to": "logs",
        "read_jsonl": "jsonl",
        "summarize": "summary",
        "write_atomic": "files",
    },
)

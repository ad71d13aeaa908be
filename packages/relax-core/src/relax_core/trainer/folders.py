"""The folders of a run's checkpoints: which there are, and which go."""

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step_(\d+)")


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def tidy_checkpoints(root: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and what a killed process had begun to write."""
    for old in (*list_checkpoints(root)[:-keep], *root.glob(".step_*.partial")):
        shutil.rmtree(old)

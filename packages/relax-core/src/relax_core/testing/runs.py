"""A whole run of a config, and what tests compare of it."""

import json
from pathlib import Path
from typing import Any

from relax_bridge import Checkpoint
from torch import Tensor

from relax_core.config import RelaxConfig
from relax_core.loop import run
from relax_core.run import RunDirectory


def start(config: RelaxConfig, path: Path) -> RunDirectory:
    """Runs a config to its end in a new directory `path`.

    Raises:
        RuntimeError: it ended otherwise.
    """
    with RunDirectory.create(path, config) as directory:
        outcome = run(config, directory, resume=False)
    if outcome != "finished":
        raise RuntimeError(f"the run in {path} ended as {outcome!r}, not 'finished'")
    return directory


def records(directory: RunDirectory) -> list[dict[str, Any]]:
    """The metrics of every step without its times, which differ from run to run."""
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of the Hugging Face checkpoint in `path`, by name."""
    checkpoint = Checkpoint.open(path)
    return {name: checkpoint.tensor(name) for name in checkpoint.names}

"""Where metrics go beside the run directory's own files: TensorBoard always, W&B when its key is set."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from relax_core.run.metrics import describe


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        ...

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        ...


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


class TensorBoardTracker:
    """Event files that `tensorboard --logdir RUN_DIR` shows."""

    def __init__(self, folder: Path, *, first_step: int | None = None) -> None:
        """Opens a new event file.

        Args:
            folder: `tensorboard/` of the run.
            first_step: on resume, the first step to come: TensorBoard then hides later ones of earlier files.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases that carries the run directory's name, also when resumed."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, project: str) -> None:
        """Starts or continues the W&B run.

        Raises:
            ValueError: the package wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "WANDB_API_KEY is set, but the package wandb is not installed: install it or unset the key"
            ) from error
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        self._run.finish()


def open_trackers(
    folder: Path, config: Mapping[str, Any], *, project: str, first_step: int | None = None
) -> list[Tracker]:
    """TensorBoard, and W&B if `WANDB_API_KEY` is set.

    Args:
        folder: the run directory.
        config: the resolved config, masked.
        project: W&B project.
        first_step: on resume, the first step to come.

    Raises:
        ValueError: W&B is wanted but not installed.
    """
    trackers: list[Tracker] = [TensorBoardTracker(folder / "tensorboard", first_step=first_step)]
    if os.environ.get("WANDB_API_KEY"):
        trackers.append(WandbTracker(folder, config, project=project))
    return trackers

"""Weights & Biases."""

from collections.abc import Mapping

from relax_core.run.trackers.tracker import TrackedRun


class WandbTracker:
    """A run of Weights & Biases that carries the run directory's name, also when resumed."""

    def __init__(self, run: TrackedRun) -> None:
        """Starts or continues the W&B run."""
        import wandb

        name = run.folder.name
        self._run = wandb.init(
            project=run.settings.tracker_project,
            name=name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        self._run.finish()

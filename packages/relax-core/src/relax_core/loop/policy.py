"""The model that is trained, as a loop sees it: in this process, or on the ranks of a cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from relax_rollout import RolloutEngine
from torch import Tensor

from relax_core.run.trace import ProcessSpans
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics

Scored = Literal["policy", "reference", "teacher", "critic"]
"""Whose judgement of tokens is asked for: log-probs, or the critic's values."""

Trained = Literal["policy", "critic"]


class Policy(Protocol):
    """What a loop asks of the model that is trained."""

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, of: Scored = "policy"
    ) -> list[Tensor]:
        """Log-probs of every target (values before it, of a critic), float32 [L] for each sample."""
        ...

    def step(
        self, samples: Sequence[Sample], objective: TrainingObjective, *, of: Trained = "policy"
    ) -> StepMetrics:
        """One optimizer step on a mini-batch."""
        ...

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """Makes `engine` serve the present weights as `version`; the number of tensors that were compared."""
        ...

    def export(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory in its source's dtypes, whole or not at all."""
        ...

    def save_to(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        """Where `save` writes, called once; see `relax_core.trainer.checkpoint.CheckpointWriter`."""
        ...

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes the checkpoint `step_<step>` with the loop's `state`."""
        ...

    def finish_saves(self) -> None:
        """Waits for a checkpoint that is being written behind."""
        ...

    def load(self, directory: Path) -> dict[str, Any]:
        """Restores a checkpoint; returns the loop's `state`."""
        ...

    def chip(self) -> str:
        """The driver's name of the first rank's device; see `relax_core.device.Device.chip`."""
        ...

    def watch(self, folder: Path) -> None:
        """The run's folder, for profiles and snapshots of memory; see `relax_core.loop.watch.Watch`."""
        ...

    def begin_window(self, step: int) -> None:
        """A step of a window of the profiler, or of memory, begins."""
        ...

    def end_window(self) -> None:
        """It has ended: what was seen is written."""
        ...

    def spans(self) -> Sequence[ProcessSpans]:
        """What ranks in processes of their own did since they were asked last."""
        ...

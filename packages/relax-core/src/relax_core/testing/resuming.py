"""Jobs that stop training in one layout and go on in another."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from relax_core.device import World
from relax_core.testing.row import Row
from relax_core.testing.task import STEPS, step_samples
from relax_core.testing.training import Measured, make_objective, make_trainer, measure
from relax_core.trainer.checkpoint import CheckpointWriter, load_checkpoint

BEFORE = STEPS - 1
"""Steps before the checkpoint."""


def save(row: Row, world: World, *, folder: str, asynchronous: bool = False) -> Measured | None:
    """Two steps, a checkpoint in `folder`, and the last step, measured."""
    trainer, placement = make_trainer(row, world)
    steps, objective = step_samples(row), make_objective(row)
    for samples in steps[:BEFORE]:
        trainer.step(samples, objective)
    writer = CheckpointWriter(Path(folder), trainer, keep=1, asynchronous=asynchronous)
    writer.save(BEFORE, {"drawn": torch.rand(2).tolist()})
    drawn = _draw()
    measured = measure(row, trainer, placement, steps[BEFORE:])
    writer.finish()
    return measured and replace(measured, drawn=drawn)


def resume(row: Row, world: World, *, folder: str, added: Sequence[str] = ()) -> Measured | None:
    """The last step, measured, of a training that goes on from the checkpoint in `folder`.

    Args:
        row: what is trained.
        world: this rank.
        folder: of the checkpoint.
        added: see `load_checkpoint`.
    """
    trainer, placement = make_trainer(row, world)
    torch.rand(100)
    load_checkpoint(Path(folder) / f"step_{BEFORE}", trainer, added=added)
    drawn = _draw()
    measured = measure(row, trainer, placement, step_samples(row)[BEFORE:])
    return measured and replace(measured, drawn=drawn)


def _draw() -> tuple[float, ...]:
    return (*torch.rand(2).tolist(), float(np.random.rand()), random.random())

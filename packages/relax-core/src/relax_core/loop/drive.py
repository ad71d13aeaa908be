"""`drive`: steps, evaluations, checkpoints and the export, whatever the loop trains by."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from relax_core.config.root import RelaxConfig
from relax_core.loop.garbage import resume_collection
from relax_core.loop.interruption import Interruption
from relax_core.loop.policy import Policy
from relax_core.loop.profiling import profiled
from relax_core.loop.session import Session
from relax_core.run import Recorder, RunDirectory
from relax_core.run.files import writing
from relax_core.trainer.folders import list_checkpoints

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What a step gave: metrics by name, and lines of `samples.jsonl`."""

    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()


class Loop(Protocol):
    """What `drive` needs of a loop."""

    def step(self, step: int) -> StepResult:
        """Trains on one batch; `step` counts from 1."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics on held-out data under the present weights; empty if nothing is held out."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain values that `begin` needs beside the trainer's checkpoint."""
        ...

    def begin(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Called once the trainer has its weights: those after `step`, with the loop's `state` then."""
        ...


def drive(
    loop: Loop,
    config: RelaxConfig,
    session: Session[Policy],
    directory: RunDirectory,
    recorder: Recorder,
    interruption: Interruption,
    *,
    resume_step: int,
) -> Literal["finished", "interrupted"]:
    """Runs the steps after `resume_step` (0: from the start), then exports the model and sums up."""
    resume_collection()
    last = config.run.steps
    interruption.defer()
    session.policy.save_to(
        directory.checkpoints, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
    )
    if resume_step == 0 and config.eval.before:
        recorder.step(0, loop.evaluate(0))
    for step in range(resume_step + 1, last + 1):
        with profiled(step, config, directory):
            result = loop.step(step)
        evaluated = loop.evaluate(step) if _evaluates(config, step) else {}
        recorder.step(step, {**result.metrics, **evaluated}, result.samples)
        # Asked once: a signal that comes while this step is saved ends the next one.
        ends = interruption.requested and step < last
        if ends or _saves(config, step):
            with recorder.phase("checkpoint"):
                recorder.sync()
                session.policy.save(step, {**loop.state(), "settings": settings(config, directory)})
        if ends:
            session.policy.finish_saves()
            _log.info("interrupted after step %d", step)
            return "interrupted"
    session.policy.finish_saves()
    if config.checkpoint.export == "end":
        with writing(directory.hf):
            session.policy.export(directory.hf)
    recorder.finish()
    return "finished"


def settings(config: RelaxConfig, directory: RunDirectory) -> dict[str, Any]:
    """The config as its file holds it: plain values, secrets masked."""
    plain: dict[str, Any] = directory.mask.tree(config.model_dump(mode="json"))
    return plain


def last_checkpoint(directory: RunDirectory) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    found = list_checkpoints(directory.checkpoints)
    return int(found[-1].name.removeprefix("step_")) if found else 0


def _evaluates(config: RelaxConfig, step: int) -> bool:
    if step == config.run.steps:
        return config.eval.after
    return config.eval.every > 0 and step % config.eval.every == 0


def _saves(config: RelaxConfig, step: int) -> bool:
    return step == config.run.steps or (config.checkpoint.every > 0 and step % config.checkpoint.every == 0)

"""`drive`: steps, evaluations, checkpoints and the export, whatever the loop trains by."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from relax_core.config.root import RelaxConfig
from relax_core.loop.garbage import resume_collection
from relax_core.loop.interruption import Interruption
from relax_core.loop.policy import Policy
from relax_core.loop.session import Session
from relax_core.loop.watch import in_window, watches
from relax_core.run import Recorder, RunDirectory
from relax_core.run.files import writing
from relax_core.trainer.folders import list_checkpoints

_log = logging.getLogger(__name__)


class Measured(Protocol):
    """Metrics of a step that the device may not have finished yet."""

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        ...

    def read(self) -> Mapping[str, float]:
        """Metrics by name."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step gave: metrics by name, or where they will come from, and lines of `samples.jsonl`."""

    metrics: Mapping[str, float] | Measured
    samples: Sequence[Mapping[str, Any]] = ()

    @property
    def ready(self) -> bool:
        """Whether the metrics are there."""
        return isinstance(self.metrics, Mapping) or self.metrics.ready

    def read(self) -> Mapping[str, float]:
        """The metrics, as soon as they are there."""
        return self.metrics if isinstance(self.metrics, Mapping) else self.metrics.read()


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
    """Runs the steps after `resume_step` (0: from the start), then exports the model and sums up.

    A step whose numbers are still on the device is recorded once the next one has been queued behind it, so
    that the device never waits for the host; at once where something else reads the device anyway: before an
    evaluation, a checkpoint and the end. A step's time is that from the numbers before to its own.
    """
    resume_collection()
    last = config.run.steps
    interruption.defer()
    session.policy.save_to(
        directory.checkpoints, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
    )
    if watches(config.run):
        session.policy.watch(directory.path.absolute())
    if resume_step == 0 and config.eval.before:
        recorder.step(0, loop.evaluate(0))
    late: StepResult | None = None
    for step in range(resume_step + 1, last + 1):
        watched = in_window(config.run, step)
        if watched:
            session.policy.begin_window(step)
        try:
            result = loop.step(step)
        finally:
            if late is not None:
                recorder.step(step - 1, _read(late, recorder), late.samples)
                late = None
        if watched:
            session.policy.end_window()
        recorder.gather(session.policy.spans)
        evaluates, saves = _evaluates(config, step), _saves(config, step)
        if not (result.ready or evaluates or saves or interruption.requested):
            late = result
            continue
        metrics = _read(result, recorder)
        evaluated = loop.evaluate(step) if evaluates else {}
        recorder.step(step, {**metrics, **evaluated}, result.samples)
        # Asked once: a signal that comes while this step is saved ends the next one.
        ends = interruption.requested and step < last
        if ends or saves:
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


def _read(result: StepResult, recorder: Recorder) -> Mapping[str, float]:
    """A step's metrics; what the device still trains meanwhile is training."""
    if result.ready:
        return result.read()
    with recorder.phase("train"):
        return result.read()


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

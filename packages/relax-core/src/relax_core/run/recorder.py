"""What a run loop tells about itself: phases, steps and the end; everything else follows from that."""

import logging
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil
from rich.console import Console

from relax_core.run.alerts import raised
from relax_core.run.directory import RunDirectory
from relax_core.run.files import RunDirectoryError
from relax_core.run.jsonl import JsonlWriter, read_jsonl
from relax_core.run.metrics import PHASES
from relax_core.run.progress import Progress, open_progress
from relax_core.run.summary import summarize
from relax_core.run.timer import PhaseTimer
from relax_core.run.trace import ProcessSpans, Trace, tracing
from relax_core.run.trackers import TrackedRun, open_trackers, tagged

if TYPE_CHECKING:
    from relax_core.config.root import RelaxConfig


_log = logging.getLogger(__name__)


class Recorder:
    """Writes metrics, samples, alerts, TensorBoard and W&B, shows progress, and sums the run up.

    Use it with `with`: entering opens the files of the run, and nothing is touched before; leaving closes
    them, also after an error.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: "RelaxConfig",
        *,
        resume_step: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
        age: float | None = None,
    ) -> None:
        """Prepares.

        Args:
            directory: the locked run directory.
            config: the resolved config.
            resume_step: None for a new run; else the step of the checkpoint from which it goes on, to which
                metrics and samples are cut.
            console: where progress is shown; standard error if None.
            clock: gives seconds.
            age: seconds since the process began, which count as the run's; asked of the system if None.
        """
        self._directory = directory
        self._seed = config.run.seed
        self._samples_per_step = config.run.samples_per_step
        self._clock = clock
        self._start = clock() - (_process_age() if age is None else age)
        self._config = config
        self._resume_step = resume_step
        self._console = console
        self._trace: Trace | None = None
        self._step_began = 0.0
        self.update_exposed: float | None = None
        """Seconds of the next step's weight update in which neither trainer nor engine did anything else."""
        self.peak_flops: float | None = None
        """Operations a second that the trainer's devices could do; with it a step's times hold `mfu`."""

    def _last_time(self, name: str) -> float:
        return float(self.history[-1].get("time", {}).get(name, 0.0)) if self.history else 0.0

    def _refuse_lost_steps(self, resume_step: int) -> None:
        last = self.history[-1]["step"] if self.history else 0
        if last < resume_step:
            raise RunDirectoryError(
                f"{self._directory.metrics} ends at step {last}, but the checkpoint is of step "
                f"{resume_step}: restore the file, or resume from an earlier checkpoint"
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block for a phase (see `relax_core.run.metrics.PHASES`).

        Phases may nest: the inner one's time is its own only. But all of an evaluation is `eval`, so that the
        rates of sampling and scoring are those of training batches.

        Raises:
            ValueError: there is no such phase.
        """
        if name not in PHASES:
            raise ValueError(f"there is no phase {name!r}; phases are {', '.join(PHASES)}")
        with self._timer.phase("eval" if self._timer.current == "eval" else name):
            self._progress.phase(self._timer.current)
            begin = self._clock()
            try:
                yield
            finally:
                if self._trace is not None:
                    self._trace.complete(name, "phases", begin, self._clock())
        self._progress.phase(self._timer.current)

    def gather(self, ask: Callable[[], Sequence[ProcessSpans]]) -> None:
        """Draws what other processes did, if the run has a timeline; `ask` asks them and waits."""
        if self._trace is not None:
            asked = self._clock()
            answers = ask()
            self._trace.others(answers, asked, self._clock())

    def step(
        self, step: int, metrics: Mapping[str, float], samples: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Records a finished step (0: the evaluation before training).

        Args:
            step: its number, one more than the last recorded one.
            metrics: numbers by name; the names that views know are in `relax_core.run.metrics`.
            samples: completions with `prompt`, `completion`, `reward`, `advantage` and, if the loop likes,
                more; the first `run.samples_per_step` are written.

        Returns:
            The line of `metrics.jsonl`.

        Raises:
            ValueError: the step is out of order, or a metric is no number.
            RunDirectoryError: the disk is full or a file not writable.
        """
        last = self.history[-1]["step"] if self.history else -1
        if step != last + 1 and not (last == -1 and step == 1):
            raise ValueError(f"step {step} does not follow step {last}")
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        record: dict[str, Any] = {"step": step, **numbers}
        record["time"] = self._times(numbers)
        for index, sample in enumerate(samples):
            if index >= self._samples_per_step:
                break
            self._samples.write({"step": step, **sample})
        self._metrics.write(record)
        self.history.append(record)
        for tracker in self._trackers:
            tracker.log(step, tagged(record))
        self._progress.step(record)
        if self._trace is not None:
            now = self._clock()
            self._trace.complete(f"step {step}", "steps", self._step_began, now, **numbers)
            self._trace.flush()
            self._step_began = now
        for alert in raised(self.history, self._config):
            self._alerts.write({"step": step, **asdict(alert)})
            _log.warning("step %d: %s. %s", step, alert.message, alert.advice)
        return record

    def _times(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        phases = self._timer.take()
        total = phases.pop("total")
        times: dict[str, Any] = {
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "total": round(total, 6),
            "elapsed": round(self._elapsed(), 6),
            "peak_rss_gib": round(_peak_rss_gib(), 4),
        }
        if total > 0 and "train_tokens" in numbers:
            times["tokens_per_s"] = round(numbers["train_tokens"] / total, 3)
        if self.update_exposed is not None:
            times["update_exposed"] = round(self.update_exposed, 6)
            self.update_exposed = None
        trained = phases.get("train", 0.0)
        if self.peak_flops and trained > 0 and "train_flops" in numbers:
            times["mfu"] = round(numbers["train_flops"] / trained / self.peak_flops, 5)
        return times

    def _elapsed(self) -> float:
        return self._elapsed_before + self._clock() - self._start

    def sync(self) -> None:
        """Makes all steps so far survive a power failure; call it before a checkpoint is written."""
        self._metrics.sync()
        self._samples.sync()
        self._alerts.sync()

    def finish(self, **extra: Any) -> dict[str, Any]:
        """Writes `summary.json`, which marks the run as finished, and returns it.

        Args:
            **extra: entries of the loop's own.
        """
        summary = summarize(
            self.history,
            seed=self._seed,
            wall_s=round(self._elapsed(), 3),
            peak_rss_gib=round(_peak_rss_gib(), 4),
        )
        summary |= extra
        self._directory.write_json(self._directory.summary, summary)
        return summary

    def close(self) -> None:
        """Closes every file and view. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Opens the files of the run.

        Raises:
            RunDirectoryError: a file is damaged, lacks steps before `resume_step`, or cannot be written.
            ValueError: a tracker cannot be opened.
        """
        directory, config, resume_step = self._directory, self._config, self._resume_step
        self._timer = PhaseTimer(self._clock)
        # Without a checkpoint yet, even the evaluation before the first step is done again.
        keep = resume_step or (None if resume_step is None else -1)
        with ExitStack() as stack:
            self._metrics = JsonlWriter(directory.metrics, directory.mask, keep_to_step=keep)
            stack.callback(self._metrics.close)
            self._samples = JsonlWriter(directory.samples, directory.mask, keep_to_step=keep)
            stack.callback(self._samples.close)
            self._alerts = JsonlWriter(directory.alerts, directory.mask, keep_to_step=keep)
            stack.callback(self._alerts.close)
            self.history: list[dict[str, Any]] = read_jsonl(directory.metrics)
            self._refuse_lost_steps(resume_step or 0)
            self._elapsed_before = self._last_time("elapsed")
            masked = directory.mask.tree(config.model_dump(mode="json"))
            self._trackers = open_trackers(
                TrackedRun(directory.path, masked, config.run, resumed=bool(resume_step)),
                first_step=None if keep is None else keep + 1,
            )
            for tracker in self._trackers:
                stack.callback(tracker.close)
            if config.run.trace:
                path = directory.trace(resume_step)
                self._trace = Trace(path, process=directory.path.name, clock=self._clock)
                stack.enter_context(tracing(self._trace))
                self._step_began = self._clock()
            self._progress: Progress = open_progress(
                config.run.progress,
                self._console or Console(stderr=True),
                title=directory.path.name,
                total=config.run.steps,
                done=resume_step or 0,
                clock=self._clock,
            )
            stack.callback(self._progress.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _process_age() -> float:
    return max(0.0, time.time() - float(psutil.Process().create_time()))


def _peak_rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"metric {name} is a {type(value).__name__}; give an int or a float (tensor.item())")
    return value

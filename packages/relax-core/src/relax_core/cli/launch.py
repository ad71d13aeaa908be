"""Starts or resumes a run: its directory, its log, and the loop inside them."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from relax_core.cli.preflight import refuse_unready
from relax_core.config.layer import Layer
from relax_core.config.load import resolve
from relax_core.config.overrides import parse_overrides
from relax_core.config.problems import Problem
from relax_core.config.root import RelaxConfig
from relax_core.config.yaml_text import YamlError, parse_yaml
from relax_core.loop.changes import RESUMABLE
from relax_core.loop.garbage import collection_paused
from relax_core.loop.interruption import Interruption
from relax_core.run.directory import RunDirectory
from relax_core.run.files import RunDirectoryError
from relax_core.run.logs import logging_to
from relax_core.run.words import number

logger = logging.getLogger(__name__)


def run_name(recipe: str, now: time.struct_time) -> str:
    """The name of a run whose user gave none: recipe and local time."""
    stem = Path(recipe).stem if "/" in recipe or recipe.endswith((".yaml", ".yml")) else recipe
    clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip("._-")
    return f"{clean or 'run'}-{time.strftime('%Y%m%d-%H%M%S', now)}"


def resume_config(run_dir: Path, overrides: Sequence[str]) -> RelaxConfig:
    """The config of an earlier run, with the few settings that may change when it goes on.

    Raises:
        RunDirectoryError: there is no run, or its config cannot be read.
        ConfigError: the config is refused, or a setting that must stay was given.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise RunDirectoryError(f"{run_dir} holds no run: it has no config.yaml; give the folder of a run")
    try:
        values, lines = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    stored = Layer(values, {path: f"{file}, line {line}" for path, line in lines.items()})
    changes = parse_overrides(RelaxConfig, overrides)
    changes.problems += [
        Problem(path, "cannot change when a run is resumed", origin=origin, allowed=", ".join(RESUMABLE))
        for path, origin in changes.origins.items()
        if ".".join(path) not in RESUMABLE
    ]
    return resolve(RelaxConfig, [stored, changes])


def start(config: RelaxConfig, recipe: str, console: Console) -> int:
    """Starts a new run.

    Args:
        config: the resolved config; a missing name is filled in.
        recipe: the recipe's name or path, for the name.
        console: gets progress, warnings and the closing lines.

    Returns:
        The exit code.

    Raises:
        ConfigError: what the settings name is not there.
        RunDirectoryError: the run directory cannot be used.
    """
    _set_environment()
    refuse_unready(config)
    name = config.run.name or run_name(recipe, time.localtime())
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    with RunDirectory.create(config.run.dir / name, named) as directory:
        return _run(named, directory, console, resume=False)


def resume(run_dir: Path, config: RelaxConfig, console: Console) -> int:
    """Goes on with an interrupted run, or with a finished one that was given more steps.

    Returns:
        The exit code.

    Raises:
        ConfigError: what the settings name is not there any more.
        RunDirectoryError: the run directory cannot be used, or the run is finished.
    """
    with RunDirectory.resume(run_dir) as directory:
        if directory.finished and config.run.steps <= directory.steps_done():
            raise RunDirectoryError(
                f"{run_dir} holds a finished run of {directory.steps_done()} steps: nothing is left to do; "
                "give more with --run.steps, or start a new run"
            )
        _set_environment()
        refuse_unready(config)
        return _run(config, directory, console, resume=True)


def _set_environment() -> None:
    """What torch reads when it is loaded."""
    # Idle OpenMP threads that spin take the cores from the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The number of threads, and with it the order of sums, stays what it is under any load.
    os.environ.setdefault("OMP_DYNAMIC", "FALSE")
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")


def _run(config: RelaxConfig, directory: RunDirectory, console: Console, *, resume: bool) -> int:
    if config.run.progress != "none":
        loading = f"{directory.path}: loading torch, megatron-core and the model ..."
        console.print(loading, style="dim", soft_wrap=True, highlight=False)
    with (
        logging_to(directory.log, directory.mask, console, level=config.run.log_level),
        Interruption() as interruption,
    ):
        try:
            with collection_paused():
                from relax_core.loop import run

                outcome = run(config, directory, resume=resume, interruption=interruption)
        except (ValueError, OSError) as error:
            # The terminal gets the message alone; log.txt the traceback too.
            logger.error("%s", error, exc_info=True)
            console.print(
                f"The traceback is in {directory.log}", style="dim", soft_wrap=True, highlight=False
            )
            return 1
        except KeyboardInterrupt:
            logger.info("interrupted at once")
            outcome = "interrupted"
        except BaseException:
            logger.exception("the run failed")
            raise
        _draw_report(directory, logging.WARNING if outcome == "finished" else logging.INFO)
    if outcome == "interrupted":
        console.print(f"Interrupted. Go on with: relax-train --resume {directory.path}", soft_wrap=True)
        return 130
    for line in _closing_lines(directory):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def _closing_lines(directory: RunDirectory) -> Iterator[str]:
    summary = directory.read_summary()
    before, after = summary.get("eval_before"), summary.get("eval_after")
    if before is not None and after is not None:
        yield f"Held-out {summary['eval_metric']}: {number(before)} before, {number(after)} after"
    yield f"Finished: {directory.path}" + (f"; open {directory.report}" if directory.report.exists() else "")


def _draw_report(directory: RunDirectory, level: int) -> None:
    """The page is a convenience: a run that ended well does not fail for want of it."""
    from relax_core.cli.report import draw
    from relax_core.report import ReportError

    try:
        draw([directory.path])
    except (ReportError, RunDirectoryError) as error:
        logger.log(level, "no report.html: %s", error)

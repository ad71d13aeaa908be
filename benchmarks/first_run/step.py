"""One GRPO step of Relax beside TRL's, and the start-up of both, in one run: JSON lines.

    python benchmarks/first_run/step.py [--threads 1 2] [--rounds 7] [--starts 2] [--cache FOLDER]

Both sides start from the same random checkpoint, each in a process of its own, TRL in an environment of its
own. They take their steps in turn, one side waiting while the other works, so that noise of the machine hits
both. Before a number is printed, both must give the same log-probs for the same completions, and train on the
same number of tokens in every step. The exit status is 1 if they do not, or if the ratio misses its target.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gate import Example
from side import Side, StepTimes
from sizes import MAX_NEW_TOKENS, PROMPTS, SAMPLES
from trl_environment import default_cache, trl_python

HERE = Path(__file__).parent
NAMES = ("relax", "trl")
TARGET = 0.25
TOLERANCE = 1e-4


class ParityError(RuntimeError):
    """The sides do not do the same work, so that their times say nothing."""


@dataclass(frozen=True)
class Bench:
    """What every start of a side needs.

    Attributes:
        folder: for everything written.
        python: TRL's interpreter.
        examples: completions that both sides score.
    """

    folder: Path
    python: Path
    examples: list[Example]

    def start(self, name: str, label: str, threads: int) -> Side:
        """Starts a side and waits until it stands before its first step."""
        folder = self.folder / f"{label}-{name}"
        folder.mkdir()
        command = self._relax(folder, threads) if name == "relax" else self._trl(folder, threads)
        # Both sides get what relax-train sets for itself, and keep their bytecode in one place of this run.
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_DYNAMIC": "FALSE",
            "MKL_DYNAMIC": "FALSE",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return Side(name, command, folder, environment)

    def _relax(self, folder: Path, threads: int) -> list[str]:
        settings = {
            "model.path": self.folder / "model",
            "data.path": self.folder / "train.jsonl",
            "data.eval_path": "null",
            "data.chat": "false",
            "run.dir": folder,
            "run.name": "run",
            "run.steps": 10_000,
            "run.threads": threads,
            "rollout.prompts_per_step": PROMPTS,
            "rollout.samples_per_prompt": SAMPLES,
            "rollout.max_new_tokens": MAX_NEW_TOKENS,
            "trainer.lr": 1e-4,
            "trainer.warmup_steps": 0,
            "eval.before": "false",
            "eval.every": 0,
            "checkpoint.every": 0,
        }
        flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        return [sys.executable, str(HERE / "relax_side.py"), *flags]

    def _trl(self, folder: Path, threads: int) -> list[str]:
        arguments = [self.folder / "model", self.folder / "train.jsonl", folder / "output", threads]
        return [str(self.python), str(HERE / "trl_side.py"), *map(str, arguments)]

    def parity(self, sides: Sequence[Side]) -> float:
        """The largest difference of a log-prob between the sides.

        Raises:
            ParityError: it is too large.
        """
        ours, theirs = ([x for row in side.score(self.examples) for x in row] for side in sides)
        gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if not gap <= TOLERANCE:
            raise ParityError(f"log-probs of the same completions differ by {gap:.2g}, above {TOLERANCE:g}")
        return float(f"{gap:.2g}")


def first_start(bench: Bench, threads: int) -> dict[str, object]:
    """The first start of each side, without bytecode of the packages; it leaves that for all later starts."""
    with ExitStack() as stack:
        sides = [stack.enter_context(bench.start(name, "first", threads)) for name in NAMES]
        gap = bench.parity(sides)
    ours, theirs = (side.startup_s for side in sides)
    return {
        "case": "first_start",
        "threads": threads,
        "logprob_gap": gap,
        "ratio": round(ours / theirs, 3),
        "relax_s": round(ours, 2),
        "trl_s": round(theirs, 2),
    }


def grpo_step(bench: Bench, threads: int, rounds: int, starts: int) -> dict[str, object]:
    """Starts of each side in turn, then steps of each side in turn."""
    startups: dict[str, list[float]] = {name: [] for name in NAMES}
    times: dict[str, list[StepTimes]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        for attempt in range(starts):
            label = f"{threads}-{attempt}"
            sides = [stack.enter_context(bench.start(name, label, threads)) for name in NAMES]
            for side in sides:
                startups[side.name].append(side.startup_s)
                if attempt < starts - 1:
                    side.stop()
        gap = bench.parity(sides)
        for _ in range(rounds + 1):
            for side in sides:
                times[side.name].append(side.step())
        tokens = {each.tokens for name in NAMES for each in times[name]}
        if len(tokens) > 1:
            raise ParityError(
                f"steps of the two sides train on different numbers of tokens: {sorted(tokens)}"
            )
        peaks = {side.name: side.stop() for side in sides}
    add_relax_phases(times["relax"], bench.folder / f"{label}-relax" / "run")
    first = {name: times[name].pop(0) for name in NAMES}
    wall, cpu = (
        middle([getattr(a, what) / getattr(b, what) for a, b in zip(*times.values(), strict=True)])
        for what in ("wall_s", "cpu_s")
    )
    return {
        "case": "grpo_step",
        "threads": threads,
        "logprob_gap": gap,
        "tokens_per_step": tokens.pop(),
        "ratio": wall,
        "ratio_cpu": cpu,
        "ratio_start": round(statistics.median(startups["relax"]) / statistics.median(startups["trl"]), 3),
        "ratio_memory": round(peaks["relax"] / peaks["trl"], 3),
        "target": TARGET,
        "ok": wall["median"] <= TARGET,
        **{name: summary(times[name], first[name], startups[name], peaks[name]) for name in NAMES},
    }


def add_relax_phases(steps: Sequence[StepTimes], run: Path) -> None:
    """Relax books its own phases, in the metrics of its run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for step, line in zip(steps, lines, strict=True):
        step.phases.update(json.loads(line)["time"]["phases"])


def summary(
    steps: Sequence[StepTimes], first: StepTimes, startups: Sequence[float], peak: float
) -> dict[str, object]:
    """What one side took."""
    return {
        "step_s": middle([each.wall_s for each in steps]),
        "step_cpu_s": middle([each.cpu_s for each in steps]),
        "phases_s": {
            name: round(statistics.median(each.phases[name] for each in steps), 4) for name in first.phases
        },
        "first_step_s": round(first.wall_s, 3),
        "startup_s": middle(startups),
        "reward": round(statistics.fmean(each.reward for each in steps), 4),
        "peak_rss_gib": round(peak, 3),
    }


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def make_task(folder: Path) -> list[Example]:
    """Writes checkpoint and data into the folder, and returns what both sides are to score."""
    run = subprocess.run(
        [sys.executable, str(HERE / "task.py"), str(folder)], check=True, stdout=subprocess.PIPE, text=True
    )
    return [(prompt, completion) for prompt, completion in json.loads(run.stdout)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="one line for each")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each side after its first")
    parser.add_argument("--starts", type=int, default=2, help="starts of each side in a line")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of TRL's environment")
    arguments = parser.parse_args()
    python = trl_python(arguments.cache)
    good = True
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), python, make_task(Path(name)))
        try:
            print(json.dumps(first_start(bench, arguments.threads[0])), flush=True)
            for threads in arguments.threads:
                line = grpo_step(bench, threads, arguments.rounds, arguments.starts)
                print(json.dumps(line), flush=True)
                good &= bool(line["ok"])
        except ParityError as error:
            print(f"no times: {error}", file=sys.stderr)
            return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

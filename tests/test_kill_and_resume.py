"""A run that is killed, interrupted or out of disk goes on to the very bytes of one that was left alone.

Runs are forked from one process that has everything imported, so that each starts in a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STEPS = 5
SMALL = {
    "run.progress": "plain",
    "run.threads": 1,
    "run.steps": STEPS,
    "rollout.prompts_per_step": 6,
    "rollout.samples_per_prompt": 4,
    "trainer.optimizer_steps_per_batch": 2,
    "algorithm.kl_loss_coef": 0.01,
    "eval.every": 2,
    "eval.max_prompts": 8,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
}
STARTER = """
import json, os, resource, sys, traceback, warnings
warnings.simplefilter("ignore")
from transformers.models.qwen3_5 import modeling_qwen3_5
import relax_core.cli.report, relax_core.loop.start, relax_core.report, relax_rollout.engines.transformers
from relax_core.cli.train import main
warnings.resetwarnings()

def child(arguments, folder, file_size):
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    code = 70
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    request = json.loads(line)
    if "pid" in request:
        pid, status = os.waitpid(request["pid"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        child(**request)
    print(pid, flush=True)
"""


class Starter:
    """Forks `relax-train` from a process that has imported it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Run:
    """One `relax-train` in a folder, under way or ended."""

    starter: Starter
    folder: Path
    pid: int
    code: int | None = None

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def running(self) -> bool:
        if self.code is None:
            self.code = self.starter.ask(pid=self.pid)
        return self.code is None

    def until(self, reached: Callable[[], bool], *, seconds: float = 120) -> None:
        """Waits for a moment of the run."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.running(), f"ended with code {self.code} before its moment:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, self.output[-3000:]

    def end(self, *, seconds: float = 120) -> int:
        deadline = time.monotonic() + seconds
        while self.running():
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def small(name: str, **changes: object) -> list[str]:
    """The flags of a small run; `run__seed=1` changes `run.seed`."""
    settings = {**SMALL, "run.name": name, **{key.replace("__", "."): v for key, v in changes.items()}}
    return [f"--{key}={value}" for key, value in settings.items()]


Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Starts `relax-train` with these arguments in a folder."""
    starter = Starter()
    started: list[Run] = []

    def start(folder: Path, *arguments: str, file_size: int = 0) -> Run:
        pid = starter.ask(arguments=arguments, folder=str(folder), file_size=file_size)
        started.append(Run(starter, folder, pid))
        return started[-1]

    yield start
    for run in started:
        if run.running():
            run.send(signal.SIGKILL)
            run.end()
    starter.close()


ALIVE = {".lock", "log.txt"}
"""What every process writes to the run directory."""


def records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


def bytes_of(run: Path) -> dict[str, bytes]:
    """Everything a run leaves that has no time, place or name in it."""
    files = [run / "samples.jsonl", *run.glob("hf/*"), *run.glob("checkpoints/*/*.distcp")]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted(files)}


def assert_equal(run: Path, reference: Path) -> None:
    assert records(run) == records(reference)
    ours, theirs = bytes_of(run), bytes_of(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in reference.iterdir())
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step_{STEPS - 1}",
        f"step_{STEPS}",
    ]


@pytest.fixture(scope="module")
def reference(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    run = train(folder, *small("whole"))
    assert run.end() == 0, run.output[-3000:]
    return folder / "runs" / "whole"


def done(step: int) -> Callable[[Path], bool]:
    return lambda run: len(records(run)) > step


MOMENTS: dict[str, list[Callable[[Path], bool]]] = {
    "while it loads": [lambda run: (run / "log.txt").exists()],
    "before the first checkpoint": [done(0), done(0)],
    "inside the first checkpoint": [lambda run: any(run.glob("checkpoints/.step_1.partial/*"))],
    "inside later checkpoints": [
        lambda run: any(run.glob("checkpoints/.step_3.partial/*.distcp")),
        lambda run: any(run.glob("checkpoints/.step_4.partial/manifest.json")),
    ],
    "between steps": [done(1), done(3)],
    "while checkpoints are written behind": [done(1), done(2), done(3)],
    "while it exports": [lambda run: any(run.glob(".hf.*"))],
    "once all is saved": [lambda run: (run / "checkpoints" / f"step_{STEPS}").exists()],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_that_is_resumed_ends_with_the_same_bytes(
    train: Train, reference: Path, tmp_path: Path, moment: str
) -> None:
    path = tmp_path / "runs" / "killed"
    run = train(tmp_path, *small("killed", checkpoint__asynchronous=moment.endswith("written behind")))
    for reached in MOMENTS[moment]:
        run.until(lambda reached=reached: reached(path))
        run.send(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        assert reached(path)
        run = train(tmp_path, "--resume", "runs/killed")
    assert run.end() == 0, run.output[-3000:]
    assert "Traceback" not in run.output
    assert_equal(path, reference)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_a_signal_ends_with_a_checkpoint_and_a_hint_and_a_second_one_at_once(
    train: Train, reference: Path, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    path = tmp_path / "runs" / "stopped"
    run = train(tmp_path, *small("stopped", checkpoint__every=0))
    run.until(lambda: done(1)(path))
    for _ in range(times):
        run.send(number)
        run.until(lambda: number.name in run.output)
    assert run.end() == 130
    assert "Go on with: relax-train --resume runs/stopped" in run.output
    saved = [f"step_{len(records(path)) - 1}"] if times == 1 else []
    assert [found.name for found in (path / "checkpoints").iterdir()] == saved

    again = train(tmp_path, *small("stopped"))
    assert again.end() == 2
    assert "holds an unfinished run" in again.output

    on = train(tmp_path, "--resume", "runs/stopped", "--checkpoint.every=1")
    assert on.end() == 0, on.output[-3000:]
    assert_equal(path, reference)


@pytest.mark.parametrize("room", [1_000, 3_500, 100_000])
def test_a_run_out_of_disk_says_so_and_goes_on_once_there_is_room(
    train: Train, reference: Path, tmp_path: Path, room: int
) -> None:
    """A limit on the size of every file stands in for the disk: the run's largest are its checkpoints.

    There is room for its settings, and so many bytes: without them there is no run to go on with.
    """
    path = tmp_path / "runs" / "full"
    settings = (reference / "config.yaml").stat().st_size
    run = train(tmp_path, *small("full"), file_size=settings + room)
    assert run.end() == 1
    assert "error cannot write runs/full/" in run.output
    assert "file sizes" in run.output
    assert not any((path / "checkpoints").iterdir())
    run = train(tmp_path, "--resume", "runs/full")
    assert run.end() == 0, run.output[-3000:]
    assert "Traceback" not in run.output
    assert_equal(path, reference)


def test_a_checkpoint_cut_in_half_is_refused_and_nothing_is_overwritten(
    train: Train, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "cut"
    subprocess.run(["cp", "-r", reference, run], check=True)
    newest = run / "checkpoints" / f"step_{STEPS}"
    victim = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in ALIVE}
    refused = train(tmp_path, "--resume", "cut", f"--run.steps={STEPS + 1}")
    assert refused.end() == 1
    assert f"checkpoint cut/checkpoints/{newest.name} is damaged: {victim.name} has" in refused.output
    assert "Traceback" not in refused.output
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_directory_in_use_is_refused(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path, *small("busy"))
    run.until(lambda: done(0)(tmp_path / "runs" / "busy"))
    for arguments in (["--resume", "runs/busy"], small("busy")):
        other = train(tmp_path, *arguments)
        assert other.end() == 2
        assert f"runs/busy is in use by process {run.pid} on" in other.output
    assert run.running()


def test_the_same_seed_gives_the_same_bytes_on_one_thread_and_on_two(
    train: Train, reference: Path, tmp_path: Path
) -> None:
    runs = [
        train(tmp_path, *small(name, run__threads=threads))
        for name, threads in (("one", 1), ("two", 2), ("two-again", 2))
    ]
    assert [run.end() for run in runs] == [0, 0, 0]
    assert_equal(tmp_path / "runs" / "one", reference)
    assert_equal(tmp_path / "runs" / "two-again", tmp_path / "runs" / "two")

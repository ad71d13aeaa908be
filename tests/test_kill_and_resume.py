"""A run that is killed, interrupted or out of disk goes on to the very bytes of one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 6
SMALL = (
    "--run.progress=plain",
    "--run.threads=1",
    f"--run.steps={STEPS}",
    "--rollout.prompts_per_step=6",
    "--rollout.samples_per_prompt=4",
    "--eval.every=2",
    "--eval.max_prompts=8",
    "--checkpoint.every=1",
    "--checkpoint.keep=2",
)


def relax_train(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "relax_core.cli.train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def finish(process: subprocess.Popen, folder: Path) -> None:
    assert process.wait(timeout=400) == 0, (folder / "output.txt").read_text()[-3000:]


def records(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


def samples(run: Path) -> bytes:
    return (run / "samples.jsonl").read_bytes()


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def wait_for_step(process: subprocess.Popen, run: Path, step: int, folder: Path) -> None:
    deadline = time.monotonic() + 400
    metrics = run / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") > step:
            return
        assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.005)
    raise TimeoutError(f"step {step} was not reached")


def assert_equal(run: Path, reference: Path) -> None:
    assert records(run) == records(reference)
    assert samples(run) == samples(reference)
    assert weights(run) == weights(reference)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    finish(relax_train(folder, *SMALL, "--run.name=whole"), folder)
    return folder / "runs" / "whole"


def test_killed_at_several_moments_and_resumed_it_ends_with_the_same_bytes(reference, tmp_path):
    moments = random.Random(20)
    process = relax_train(tmp_path, *SMALL, "--run.name=killed")
    run = tmp_path / "runs" / "killed"
    # Before the first checkpoint, and twice later, each time somewhere inside a step.
    for step in (0, 2, 4):
        wait_for_step(process, run, step, tmp_path)
        time.sleep(moments.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = relax_train(tmp_path, "--resume", str(run))
    finish(process, tmp_path)
    assert_equal(run, reference)


def test_an_interrupt_ends_with_a_checkpoint_and_a_hint_how_to_go_on(reference, tmp_path):
    process = relax_train(tmp_path, *SMALL, "--run.name=stopped", "--checkpoint.every=0")
    run = tmp_path / "runs" / "stopped"
    wait_for_step(process, run, 1, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130
    assert f"relax-train --resume {run.relative_to(tmp_path)}" in (tmp_path / "output.txt").read_text()
    done = len(records(run)) - 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done}"]

    second = relax_train(tmp_path, *SMALL, "--run.name=stopped")
    assert second.wait(timeout=100) == 2
    assert "holds an unfinished run" in (tmp_path / "output.txt").read_text()

    finish(relax_train(tmp_path, "--resume", str(run)), tmp_path)
    assert_equal(run, reference)


def test_a_checkpoint_cut_in_half_is_refused_and_nothing_is_overwritten(reference, tmp_path):
    run = tmp_path / "cut"
    subprocess.run(["cp", "-r", reference, run], check=True)
    (run / "summary.json").unlink()
    newest = run / "checkpoints" / f"step_{STEPS}"
    victim = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    before = (records(run), samples(run), weights(run))
    process = relax_train(tmp_path, "--resume", str(run), f"--run.steps={STEPS + 1}")
    assert process.wait(timeout=100) == 1
    output = (tmp_path / "output.txt").read_text()
    assert f"checkpoint {newest} is damaged: {victim.name} has" in output
    assert "Traceback" not in output
    assert (records(run), samples(run), weights(run)) == before


def test_a_run_directory_in_use_is_refused(tmp_path):
    process = relax_train(tmp_path, *SMALL, "--run.name=busy")
    try:
        wait_for_step(process, tmp_path / "runs" / "busy", 0, tmp_path)
        other = relax_train(tmp_path, "--resume", "runs/busy")
        assert other.wait(timeout=100) == 2
        assert "in use" in (tmp_path / "output.txt").read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()

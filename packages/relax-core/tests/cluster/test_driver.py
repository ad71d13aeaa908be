"""The process that runs the loop is killed: its Ray ends too, and a resumed run ends with equal bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from relax_core.config.yaml_text import dump_config
from relax_core.data import load_prompts, load_tokenizer
from relax_core.loop import run
from relax_core.run import RunDirectory


def ray_processes(driver):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(f"relax-ray-{driver}-" in part for part in process.info["cmdline"] or ())
    ]


@pytest.fixture
def killed(tmp_path):
    """Starts a run, kills its driver so long after a checkpoint is there, and gives the run's folder."""

    def go(config, checkpoint, wait_s):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump_config(config))
        flags = ["--recipe", str(recipe), "--run.dir", str(tmp_path / "runs")]
        with (tmp_path / "out.txt").open("w") as out:
            driver = subprocess.Popen(
                [sys.executable, "-m", "relax_core.cli.train", *flags], stdout=out, stderr=subprocess.STDOUT
            )
        path = tmp_path / "runs" / config.run.name
        deadline = time.monotonic() + 400
        while not (path / "checkpoints" / checkpoint).exists():
            assert driver.poll() is None, (tmp_path / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ray_processes(driver.pid)
        time.sleep(wait_s)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        while ray_processes(driver.pid):
            assert time.monotonic() < deadline, "Ray goes on without its driver"
            time.sleep(0.2)
        return path, driver.pid

    return go


def test_a_driver_that_was_killed_resumes_with_equal_bits(
    small_run, finish, read_results, killed, same_results
):
    expected = finish(small_run(run={"steps": 3}, checkpoint={"every": 1}), "inline")
    config = small_run(run={"steps": 3, "name": "run"}, checkpoint={"every": 1}, cluster={"mode": "ray"})
    path, pid = killed(config, "step_1", 0)
    with RunDirectory.resume(path) as directory:
        assert run(config, directory, resume=True) == "finished"
    same_results(read_results(directory), expected)
    # Neither Ray's files nor the mini-batches since the checkpoint are left behind.
    assert not list(Path("/tmp").glob(f"relax-ray-{pid}-*"))
    assert not list(Path("/tmp").glob(f"relax-journal-{pid}-*"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_driver_that_sampled_ahead_resumes_with_its_queue(small_run, killed, seed):
    """Killed at a random moment: every prompt is trained once, in the order in which it was drawn."""
    config = small_run(
        run={"steps": 5, "name": "ahead"},
        checkpoint={"every": 1},
        cluster={"mode": "ray", "placement": "async", "max_staleness": 2},
        trainer={"lr": 1e-4},
        rollout={"max_new_tokens": 24},
        eval={"before": False, "after": False},
    )
    path, _ = killed(config, "step_2", random.Random(seed).random() * 2)
    with RunDirectory.resume(path) as directory:
        assert run(config, directory, resume=True) == "finished"
    samples = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    steps = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert len(samples) == 5 * 16
    trained = [s["prompt"] for step in range(1, 6) for s in [x for x in samples if x["step"] == step][:4]]
    data = load_prompts(config.data, load_tokenizer(config.model.path), seed=config.run.seed)
    assert trained == [prompt.prompt_text for prompt in data.stream().take(20)]

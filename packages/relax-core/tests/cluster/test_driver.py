"""The process that runs the loop is killed: its Ray ends too, and a resumed run ends with equal bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from relax_core.config.yaml_text import dump_config
from relax_core.loop import run
from relax_core.run import RunDirectory


def ray_processes(driver):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(f"relax-ray-{driver}-" in part for part in process.info["cmdline"] or ())
    ]


def test_a_driver_that_was_killed_resumes_with_equal_bits(
    small_run, finish, read_results, tmp_path, same_results
):
    expected = finish(small_run(run={"steps": 3}, checkpoint={"every": 1}), "inline")
    config = small_run(run={"steps": 3, "name": "run"}, checkpoint={"every": 1}, cluster={"mode": "ray"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(config))
    flags = ["--recipe", str(recipe), "--run.dir", str(tmp_path / "runs")]
    with (tmp_path / "out.txt").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-m", "relax_core.cli.train", *flags], stdout=out, stderr=subprocess.STDOUT
        )
    path = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 300
    while not (path / "checkpoints" / "step_1").exists():
        assert driver.poll() is None, (tmp_path / "out.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ray_processes(driver.pid)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    while ray_processes(driver.pid):
        assert time.monotonic() < deadline, "Ray goes on without its driver"
        time.sleep(0.2)
    with RunDirectory.resume(path) as directory:
        assert run(config, directory, resume=True) == "finished"
    same_results(read_results(directory), expected)
    assert not list(Path("/tmp").glob(f"relax-ray-{driver.pid}-*"))

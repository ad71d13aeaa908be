"""Starting Ray on a machine that is too busy for its own limits of time."""

import subprocess
import sys
import threading

import pytest
from relax_core.cluster import ray_process
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError

SLOW = "The current node timed out during startup. This could happen because"


@pytest.fixture
def calls(monkeypatch):
    """`ray.init` that times out so many times, leaving a process behind each time."""
    seen, left = [], []

    def plan(failures):
        def init(address, **options):
            seen.append(address)
            if address == "local" and len(seen) <= failures:
                left.append(
                    subprocess.Popen(
                        [sys.executable, "-c", "import time; time.sleep(60)", options["_temp_dir"]]
                    )
                )
                raise Exception(SLOW)

        monkeypatch.setattr(ray_process.ray, "init", init)
        return seen, left

    yield plan
    for process in left:
        process.kill()
        process.wait()


def test_it_is_tried_again_and_what_was_left_is_ended(calls):
    seen, left = calls(2)
    with ray_process.open_ray(ClusterConfig(mode="ray"), cpus=1, weight_bytes=1):
        assert seen == ["local"] * 3
        assert [process.wait(10) for process in left] == [-9, -9]


def test_what_came_up_late_is_joined(calls, monkeypatch):
    monkeypatch.setattr(ray_process, "_runs", lambda folder, name: True)
    seen, _ = calls(1)
    with ray_process.open_ray(ClusterConfig(mode="ray"), cpus=1, weight_bytes=1):
        assert len(seen) == 2
        assert seen[1].startswith("127.0.0.1:")


def test_one_that_came_up_and_answers_nothing_is_given_up(calls, monkeypatch):
    calls(1)
    first, silence = ray_process.ray.init, threading.Event()
    monkeypatch.setattr(
        ray_process.ray,
        "init",
        lambda address, **options: first(address, **options) if address == "local" else silence.wait(400),
    )
    monkeypatch.setattr(ray_process, "_runs", lambda folder, name: True)
    monkeypatch.setattr(ray_process, "_PATIENCE_S", 0.5)
    with (
        pytest.raises(ClusterError, match=r"Ray did not start within 0.5 seconds"),
        ray_process.open_ray(ClusterConfig(mode="ray"), cpus=1, weight_bytes=1),
    ):
        pass
    silence.set()


def test_patience_ends(calls, monkeypatch):
    monkeypatch.setattr(ray_process, "_PATIENCE_S", -1.0)
    calls(9)
    with (
        pytest.raises(ClusterError, match=r"Ray did not start within .* The machine is overloaded"),
        ray_process.open_ray(ClusterConfig(mode="ray"), cpus=1, weight_bytes=1),
    ):
        pass

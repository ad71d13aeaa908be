"""A Ray of two nodes that runs already is joined by its address, and goes on when the run has ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from relax_core.cluster.errors import ClusterError
from relax_core.config.yaml_text import dump_config
from relax_core.run import RunDirectory

# The token of these tests is that of Rays of the runs' own.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
START = "import sys; from ray.scripts.scripts import main; sys.argv[1:1] = ['start']; main()"


def of_a_job(address):
    """What Ray's job manager gives the command of a job that sets a variable which a run sets too."""
    runtime_env = {"env_vars": {"PYTHONPATH": "/nowhere"}}
    job = {"runtime_env": runtime_env, "metadata": {"job_submission_id": "raysubmit_test"}}
    return {"RAY_ADDRESS": address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}


class TwoNodes:
    """A Ray on the loopback that is no run's own, with 3 and 2 CPUs."""

    def __init__(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        # Ray takes 127.0.0.1 for an address of the host on the net.
        self.address = f"127.0.0.3:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="relax-test-ray-", dir="/tmp"))
        head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(self.folder)]
        self._head = self._start("127.0.0.3", "3", *head)
        self._other = self._start_other()

    def _start(self, ip, cpus, *arguments):
        node = ["--block", "--node-ip-address", ip, "--num-cpus", cpus, *arguments]
        return subprocess.Popen(
            [sys.executable, "-c", START, *node, "--object-store-memory", str(2**28)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # The setting by which a run's own Ray stays on the loopback forbids a second node.
            env=os.environ | NO_TOKEN | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},
        )

    def _start_other(self):
        return self._start("127.0.0.2", "2", "--address", self.address)

    @property
    def ended(self):
        """It ends itself on a machine so busy that its helpers take more than 15 seconds to start."""
        errors = self.folder.glob("session_latest/logs/raylet*.err")
        return self._head.poll() is not None or any(file.stat().st_size > 0 for file in errors)

    def see_to(self):
        """A node that comes before the first one is there gives up."""
        if self._other.poll() is not None:
            self._other = self._start_other()

    def end(self):
        for process in (self._other, self._head):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def rays():
    """A list of Rays, to which a test may add."""
    started = [TwoNodes()]
    yield started
    for ray in started:
        ray.end()


@pytest.mark.timeout(1500)  # two nodes and a run on a machine that may be busy
def test_a_job_joins_a_ray_trains_on_two_nodes_and_leaves_it_running(
    small_run, finish, read_results, rays, tmp_path
):
    """Each node has a rank with an engine: the ranks sum their gradients across, and weights go across."""
    two = {"run": {"steps": 2, "name": "joined"}}
    expected = finish(small_run(**two), "inline")
    across = {
        "cluster": {"mode": "ray", "trainer_ranks": 2, "engines": 2},
        "rollout": {"update_path": "broadcast"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_run(**two, **across)))
    deadline = time.monotonic() + 600
    while True:
        runs = tmp_path / f"runs-{time.monotonic():.0f}"
        command = [
            sys.executable, "-m", "relax_core.cli.train", "--recipe", str(recipe), "--run.dir", str(runs)
        ]  # fmt: skip
        environment = os.environ | NO_TOKEN | of_a_job(rays[-1].address)
        with (tmp_path / "out.txt").open("w") as out:
            run = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while run.poll() is None:
            rays[-1].see_to()
            time.sleep(0.5)
        if run.returncode == 0:
            break
        said = (tmp_path / "out.txt").read_text()
        assert "no Ray answers there" in said or rays[-1].ended, said
        assert time.monotonic() < deadline
        if rays[-1].ended:
            rays[-1].end()
            rays.append(TwoNodes())
        time.sleep(1)
    with RunDirectory.resume(runs / "joined") as directory:
        metrics, weights = read_results(directory)
    assert "weights travel by broadcast: as asked for" in directory.log.read_text()
    assert not rays[-1].ended
    # Sums are rounded in another order: metrics to 1e-4, weights to what Adam makes of round-off.
    for mine, theirs in zip(metrics, expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-3, msg=name)


def test_an_address_where_nobody_answers_is_refused(small_run, finish):
    config = small_run(run={"steps": 1}, cluster={"mode": "ray", "address": "127.0.0.1:1"})
    with pytest.raises(ClusterError, match="no Ray answers there"):
        finish(config, "nobody")

"""A Ray that runs already is joined by its address, and goes on when the run has ended."""

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


class Head:
    """A Ray on the loopback that is no run's own."""

    def __init__(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="relax-test-ray-", dir="/tmp"))
        command = [
            "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "4",
            "--include-dashboard", "false", "--temp-dir", str(self.folder),
            "--object-store-memory", str(2**28),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | NO_TOKEN,
        )

    @property
    def ended(self):
        """It ends itself on a machine so busy that its helpers take more than 15 seconds to start."""
        errors = self.folder / "session_latest" / "logs" / "raylet.err"
        return self.process.poll() is not None or (errors.exists() and errors.stat().st_size > 0)

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def heads():
    """A list of Rays, to which a test may add."""
    started = [Head()]
    yield started
    for head in started:
        head.end()


def test_a_job_of_a_ray_joins_it_gives_the_bits_of_one_process_and_leaves_it_running(
    small_run, finish, read_results, same_results, heads, tmp_path
):
    two = {"run": {"steps": 2, "name": "joined"}}
    expected = finish(small_run(**two), "inline")
    deadline = time.monotonic() + 300
    while True:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump_config(small_run(**two, cluster={"mode": "ray"})))
        runs = tmp_path / f"runs-{time.monotonic():.0f}"
        command = [
            sys.executable, "-m", "relax_core.cli.train", "--recipe", str(recipe), "--run.dir", str(runs)
        ]  # fmt: skip
        environment = os.environ | NO_TOKEN | of_a_job(heads[-1].address)
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode == 0:
            break
        assert "no Ray answers there" in run.stderr + run.stdout
        assert time.monotonic() < deadline
        if heads[-1].ended:
            heads[-1].end()
            heads.append(Head())
        time.sleep(2)
    with RunDirectory.resume(runs / "joined") as directory:
        same_results(read_results(directory), expected)
    assert not heads[-1].ended


def test_an_address_where_nobody_answers_is_refused(small_run, finish):
    config = small_run(run={"steps": 1}, cluster={"mode": "ray", "address": "127.0.0.1:1"})
    with pytest.raises(ClusterError, match="no Ray answers there"):
        finish(config, "nobody")

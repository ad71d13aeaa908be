"""A Ray that runs already is joined by its address, and goes on when the run has ended."""

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


@pytest.fixture
def running_ray():
    """The address of a Ray on the loopback, and its process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="relax-test-ray-", dir="/tmp"))
    command = [
        "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "4",
        "--include-dashboard", "false", "--temp-dir", str(folder), "--object-store-memory", str(2**28),
    ]  # fmt: skip
    code = "import sys; from ray.scripts.scripts import main; sys.argv[1:1] = ['start']; main()"
    head = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"127.0.0.1:{port}", head
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_joined_ray_gives_the_bits_of_one_process_and_goes_on(small_run, finish, same_results, running_ray):
    address, head = running_ray
    two = {"run": {"steps": 2}}
    expected = finish(small_run(**two), "inline")
    config = small_run(**two, cluster={"mode": "ray", "address": address})
    deadline = time.monotonic() + 240
    while True:
        try:
            found = finish(config, f"joined-{time.monotonic():.0f}")
            break
        except ClusterError:  # it is still starting
            if time.monotonic() > deadline or head.poll() is not None:
                raise
            time.sleep(2)
    same_results(found, expected)
    assert head.poll() is None


def test_an_address_where_nobody_answers_is_refused(small_run, finish):
    config = small_run(run={"steps": 1}, cluster={"mode": "ray", "address": "127.0.0.1:1"})
    with pytest.raises(ClusterError, match="no Ray answers there"):
        finish(config, "nobody")

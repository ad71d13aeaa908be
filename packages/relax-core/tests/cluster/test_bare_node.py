"""What a Ray of a run's own starts, on a real Ray."""

import json
import subprocess
import sys

from ray._private import node
from relax_core.cluster.bare_node import UNUSED, bare_node

STARTED = """
import json
import psutil
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.ray_process import open_ray

with open_ray(ClusterConfig(mode="ray"), cpus=1, weight_bytes=1):
    children = psutil.Process().children(recursive=True)
    print(json.dumps([" ".join(child.cmdline()) for child in children]))
"""


def test_it_has_its_servers_and_no_helper_that_nobody_asks():
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    started = json.loads(done.stdout.splitlines()[-1])
    for server in ("gcs_server", "raylet"):
        assert any(server in it for it in started)
    helpers = ("dashboard/dashboard.py", "log_monitor.py", "autoscaler/_private/monitor.py")
    assert not [it for it in started if any(helper in it for helper in helpers)]


def test_rays_own_starters_are_back_afterwards():
    before = [getattr(node.Node, name) for name in UNUSED]
    with bare_node():
        assert not set(before) & {getattr(node.Node, name) for name in UNUSED}
    assert [getattr(node.Node, name) for name in UNUSED] == before

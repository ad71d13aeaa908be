"""Engines of several devices on a Ray that has devices by name only: numbers, which nobody opens."""

import os
import subprocess
import sys

import pytest
import ray
from relax_core.cluster import ray_process
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError
from relax_core.cluster.plan import plan_placement
from relax_core.cluster.process import show_devices
from relax_core.cluster.ray_process import open_ray
from relax_core.cluster.seats import open_seats

SEEN = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


class Rank:
    """Says which devices Ray gave it, as a trainer rank does."""

    def devices(self):
        given = ray.get_runtime_context()
        return given.get_node_id(), [str(number) for number in given.get_accelerator_ids()["GPU"]]


class Engine:
    """Starts a server, which says which devices it sees."""

    def __init__(self, visible):
        if visible is not None:
            show_devices("cuda", visible)

    def server(self):
        seen = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True)
        return ray.get_runtime_context().get_node_id(), seen.stdout.strip().split(",")


def cluster(**settings):
    return ClusterConfig(mode="ray", **settings)


@pytest.fixture(scope="module")
def eight_devices():
    """A Ray of one host with eight GPUs that are not there."""
    start = ray.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_process.ray, "init", lambda **options: start(**options, num_gpus=8))
        with open_ray(cluster(), cpus=16, weight_bytes=1):
            yield


def test_a_server_sees_all_devices_of_the_ranks_it_takes_turns_with_and_no_others(eight_devices):
    plan = plan_placement(cluster(trainer_ranks=3, engines=1), "cuda", 2)
    with open_seats(plan, timeout_s=300) as seats:
        ranks = [ray.remote(Rank).options(**seats.rank(n)).remote() for n in range(3)]
        devices = ray.get([rank.devices.remote() for rank in ranks])
        assert len({one for _, own in devices for one in own}) == 3
        assert seats.device_ranks(0) == (0, 1)
        visible = [one for rank in seats.device_ranks(0) for one in devices[rank][1]]
        engine = ray.remote(Engine).options(**seats.engine(0)).remote(visible)
        assert ray.get(engine.server.remote()) == (devices[0][0], visible)


def test_a_server_of_its_own_devices_is_given_them_by_ray(eight_devices):
    plan = plan_placement(cluster(placement="async", trainer_ranks=1, engines=2), "cuda", 3)
    with open_seats(plan, timeout_s=300) as seats:
        assert [seats.device_ranks(number) for number in range(2)] == [()] * 2
        engines = [ray.remote(Engine).options(**seats.engine(n)).remote(None) for n in range(2)]
        seen = [own for _, own in ray.get([engine.server.remote() for engine in engines])]
        assert [len(own) for own in seen] == [3, 3]
        assert len({one for own in seen for one in own}) == 6


def test_an_engine_that_no_host_can_hold_is_refused_at_once(eight_devices):
    plan = plan_placement(cluster(placement="async", engines=1), "cuda", 16)
    words = r"needs 16 GPU on one host, and the largest of 1 has 8: lower sglang.tensor"
    with pytest.raises(ClusterError, match=words), open_seats(plan, timeout_s=120):
        pass


def test_what_does_not_fit_together_is_refused_after_a_wait(eight_devices):
    plan = plan_placement(cluster(placement="async", engines=3), "cuda", 4)
    with pytest.raises(ClusterError, match=r"'GPU': 13\.0"), open_seats(plan, timeout_s=0.1):
        pass


def test_devices_are_shown_by_the_variable_of_their_kind(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    show_devices("cuda", ["3", "5"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"

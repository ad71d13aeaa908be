"""Real runs on Ray by every path of weights: equal bits to those of one process, whoever dies on the way."""

import logging
from types import SimpleNamespace

import pytest
import torch
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.rank import TrainerRank
from relax_core.cluster.weight_path import WeightPath, equal_ranks, memory_sources
from relax_core.model.lora_config import LoraConfig
from relax_rollout import SharesRefusedError

SHORT = {"run": {"steps": 2}}


def test_runs_by_broadcast_by_disk_and_by_host_give_the_bits_of_one_process_though_an_engine_dies(
    small_run, finish, same_results, killing, caplog, tmp_path
):
    """By broadcast nothing is kept: the trainer gives the weights again, which it still has."""
    caplog.set_level(logging.INFO, "relax_core.cluster")
    inline = finish(small_run(**SHORT), "inline")
    folder = tmp_path / "weights"
    # In the first run on Ray; its step is struck off then.
    killed = killing({2: ("engine", 0)})
    for path, more in (("broadcast", {}), ("disk", {"update_folder": str(folder)}), ("host", {})):
        settings = {**SHORT, "cluster": {"mode": "ray"}, "rollout": {"update_path": path, **more}}
        same_results(finish(small_run(**settings), path), inline)
        assert f"weights travel by {path}: as asked for" in caplog.text
    assert len(killed) == 1
    assert "engine 0 serves version 1 again" in caplog.text
    assert not list(folder.iterdir())


def cluster(**settings):
    return ClusterConfig(mode="ray", **settings)


def test_engines_open_the_memory_of_the_ranks_on_their_devices():
    assert memory_sources(cluster(trainer_ranks=4, engines=2), "cuda", 2) == {0: (0, 1), 1: (2, 3)}
    assert memory_sources(cluster(trainer_ranks=4, engines=2), "cpu", 1) == {0: (0,), 1: (0,)}
    assert memory_sources(cluster(trainer_ranks=2, engines=1), "cpu", 2) == {0: (0, 1)}
    assert memory_sources(cluster(trainer_ranks=2, engines=1), "cpu", 4) == {0: (0,)}
    apart = cluster(placement="async", trainer_ranks=2, engines=2)
    assert memory_sources(apart, "npu", 1) == {}


@pytest.mark.parametrize(
    ("ranks", "parallel", "devices", "sources", "each"),
    [
        (2, {"tensor": 2}, 2, {0: (0, 1)}, 2),
        (4, {"tensor": 2}, 2, {0: (0, 1), 1: (2, 3)}, 2),
        (2, {"tensor": 2}, 1, {0: (0,)}, None),
        (2, {}, 2, {0: (0, 1)}, None),
        (4, {"tensor": 2, "pipeline": 2}, 2, {0: (0, 1)}, None),
        (4, {"tensor": 2}, 2, {0: (1, 2)}, None),
        (4, {"tensor": 2, "context": 2}, 2, {0: (0, 1), 1: (2, 3)}, 2),
    ],
)
def test_shares_are_handed_over_where_the_engine_has_a_rank_for_each(
    small_run, ranks, parallel, devices, sources, each
):
    cluster = {"mode": "ray", "trainer_ranks": ranks, "engines": len(sources)}
    sglang = {"tensor": devices} if devices > 1 else {}
    config = small_run(cluster=cluster, parallel=parallel, rollout={"engine": "sglang"}, sglang=sglang)
    assert equal_ranks(config, sources) == each


def test_tensors_that_an_engine_keeps_whole_are_gathered_and_all_if_that_is_not_enough():
    path = WeightPath("ipc", "", {0: (0, 1)}, 2)
    some = path.without(("mtp.fc.weight",), "kept whole")
    assert (some.engine_ranks, some.gathered) == (2, ("mtp.fc.weight",))
    assert some.without(("b",), "").gathered == ("mtp.fc.weight", "b")
    assert some.without(("mtp.fc.weight",), "again").engine_ranks is None
    assert path.without((), "no names").engine_ranks is None
    text = "server 0 refused receive: shares that are not enough: a.weight, b; the first: places 0 to 4"
    assert SharesRefusedError(text).names == ("a.weight", "b")
    assert SharesRefusedError("otherwise").names == ()


class Policy:
    """What a rank asks of its policy before it packs weights."""

    def __init__(self):
        self.world = SimpleNamespace(torch_device=torch.device("cpu"))
        self.places, self.holds_all, self.waited = (64, 128), True, 0

    def settle(self):
        self.waited += 1


def test_weights_that_moved_or_are_cut_otherwise_are_packed_by_another_record():
    rank = TrainerRank.__new__(TrainerRank)
    rank._policy, rank._packings = Policy(), {}
    rank._config = SimpleNamespace(lora=LoraConfig())
    first = rank._packing_for(None, ())
    assert rank._packing_for(None, ()) is first
    rank._policy.places = (64, 256)
    moved = rank._packing_for(None, ())
    cut = rank._packing_for(2, ())
    assert len({id(first), id(moved), id(cut)}) == 3
    assert list(rank._packings.values()) == [cut]
    # A record does not ask for the weights, and so does not wait for them.
    assert rank._policy.waited == 4

"""Who sits where."""

import pytest
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.plan import plan_placement


def cluster(**settings) -> ClusterConfig:
    return ClusterConfig(mode="ray", **settings)


def bundles(seats) -> list[int]:
    return [seat.bundle for seat in seats]


def test_colocated_engines_share_the_devices_of_the_first_ranks():
    plan = plan_placement(cluster(trainer_ranks=4, engines=2), "cuda")
    assert bundles(plan.ranks) == [0, 1, 2, 3]
    assert bundles(plan.engines) == [0, 1]
    assert [seat.devices for seat in plan.ranks] == [0.5, 0.5, 1, 1]
    assert [seat.devices for seat in plan.engines] == [0.5, 0.5]
    assert plan.bundles == ({"CPU": 2, "GPU": 1},) * 2 + ({"CPU": 1, "GPU": 1},) * 2


def test_apart_every_process_has_a_device_of_its_own():
    plan = plan_placement(cluster(placement="async", trainer_ranks=2, engines=3), "npu")
    assert bundles(plan.ranks) == [0, 1]
    assert bundles(plan.engines) == [2, 3, 4]
    assert all(seat.devices == 1 and not seat.shared for seat in (*plan.ranks, *plan.engines))
    assert plan.bundles == ({"CPU": 1, "NPU": 1},) * 5


def test_hybrid_engines_share_first_and_then_have_their_own():
    plan = plan_placement(cluster(placement="hybrid", trainer_ranks=2, engines=3), "cuda")
    assert bundles(plan.engines) == [0, 1, 2]
    assert [seat.shared for seat in plan.engines] == [True, True, False]
    assert [seat.devices for seat in plan.engines] == [0.5, 0.5, 1]


def test_an_engine_of_several_devices_lies_with_the_ranks_that_have_them_on_one_host():
    plan = plan_placement(cluster(trainer_ranks=6, engines=2), "npu", 2)
    assert plan.bundles == ({"CPU": 3, "NPU": 2},) * 2 + ({"CPU": 1, "NPU": 1},) * 2
    assert bundles(plan.ranks) == [0, 0, 1, 1, 2, 3]
    assert bundles(plan.engines) == [0, 1]
    # Ray has no shares of several devices: the ranks have them, and the engine is told which.
    assert [seat.devices for seat in plan.ranks] == [1] * 6
    assert [(seat.devices, seat.ranks) for seat in plan.engines] == [(0, (0, 1)), (0, (2, 3))]
    with pytest.raises(ValueError, match=r"2 with 4 devices each .* set cluster.engines to at most 1, or"):
        plan_placement(cluster(trainer_ranks=6, engines=2), "npu", 4)


def test_tasks_have_a_seat_each_and_no_device():
    plan = plan_placement(cluster(trainer_ranks=1), "npu", 1, 2)
    assert plan.bundles == ({"CPU": 2, "NPU": 1}, {"CPU": 1}, {"CPU": 1})
    assert [(seat.bundle, seat.devices) for seat in plan.tasks] == [(1, 0), (2, 0)]


def test_engines_of_several_devices_of_their_own_have_a_bundle_each():
    plan = plan_placement(cluster(placement="async", trainer_ranks=2, engines=2), "cuda", 4)
    assert plan.bundles == ({"CPU": 1, "GPU": 1},) * 2 + ({"CPU": 1, "GPU": 4},) * 2
    assert [(seat.bundle, seat.devices, seat.ranks) for seat in plan.engines] == [(2, 4, ()), (3, 4, ())]
    hybrid = plan_placement(cluster(placement="hybrid", trainer_ranks=4, engines=5), "cuda", 2)
    assert [seat.shared for seat in hybrid.engines] == [True, True, False, False, False]
    assert hybrid.shared_engines == 2


@pytest.mark.parametrize("placement", ["colocate", "async", "hybrid"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize(("ranks", "engines"), [(1, 2), (2, 3), (4, 5), (3, 8)])
def test_no_device_is_promised_twice(placement, device, ranks, engines):
    config = cluster(placement=placement, trainer_ranks=ranks, engines=engines)
    if placement == "colocate" and device != "cpu":
        with pytest.raises(ValueError, match=f"cluster.engines to at most {ranks}"):
            plan_placement(config, device)
        return
    plan = plan_placement(config, device)
    assert (len(plan.ranks), len(plan.engines)) == (ranks, engines)
    seats = (*plan.ranks, *plan.engines)
    for number, bundle in enumerate(plan.bundles):
        here = [seat for seat in seats if seat.bundle == number]
        assert len(here) == bundle["CPU"] >= 1
        assert sum(seat.devices for seat in here) <= bundle.get(plan.resource, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "inline", "engines": 2}, "engines is 2 and mode is inline"),
        ({"mode": "inline", "trainer_ranks": 2}, "trainer_ranks is 2 and mode is inline"),
        ({"mode": "inline", "placement": "async"}, "placement is 'async' and mode is inline"),
        ({"mode": "inline", "address": "auto"}, "address is 'auto' and mode is inline"),
        ({"mode": "ray", "address": "auto", "object_store_gib": 1.0}, "set object_store_gib to null"),
        (
            {"mode": "ray", "placement": "hybrid", "trainer_ranks": 2, "engines": 2},
            "engines to 3 or more",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ClusterConfig(**settings)

"""Which process runs on which device: pure arithmetic, asked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.cluster.config import ClusterConfig

_RESOURCES: Mapping[str, str] = {"cuda": "GPU", "npu": "NPU"}


@dataclass(frozen=True)
class Seat:
    """Where a process runs.

    Attributes:
        bundle: index of the placement group's bundle.
        devices: share of the bundle's device that it takes; 0 on a CPU.
        shared: a trainer rank and an engine take turns there.
    """

    bundle: int
    devices: float
    shared: bool


@dataclass(frozen=True)
class Plan:
    """Every process has a seat and every bundle one device.

    Attributes:
        bundles: what each bundle of the placement group asks of Ray.
        ranks: seats of the trainer ranks, in order; bundles 0, 1, ... so that they lie side by side.
        engines: seats of the engines, in order.
        resource: Ray's name of the devices; None on CPUs.
    """

    bundles: tuple[Mapping[str, float], ...]
    ranks: tuple[Seat, ...]
    engines: tuple[Seat, ...]
    resource: str | None


def plan_placement(config: ClusterConfig, device: str) -> Plan:
    """Seats for `config.trainer_ranks` ranks and `config.engines` engines.

    colocate: engine i shares the device of rank i. async: every process has a device of its own. hybrid: the
    first engines share the ranks' devices, one each, and the others have their own. On a CPU there is
    nothing to share but cores, and any numbers go together.

    Args:
        config: numbers and placement.
        device: name of the device, such as "cuda".

    Raises:
        ValueError: engines and ranks cannot share their devices.
    """
    resource = _RESOURCES.get(device, None if device == "cpu" else device.upper())
    ranks, engines = config.trainer_ranks, config.engines
    if config.placement == "colocate" and resource is not None and engines > ranks:
        raise ValueError(
            f"cluster.engines is {engines} and cluster.trainer_ranks {ranks}: with placement colocate every "
            f"engine shares the device of a rank; set cluster.engines to at most {ranks}, or "
            "cluster.placement to async"
        )
    sharing = {"colocate": engines, "async": 0, "hybrid": ranks}[config.placement]
    own = engines - sharing
    count = max(ranks, sharing) + own
    rank_seats = [Seat(i, _share(resource, i < sharing), i < sharing) for i in range(ranks)]
    engine_seats = [Seat(i, _share(resource, i < ranks), True) for i in range(sharing)]
    engine_seats += [Seat(count - own + i, _share(resource, False), False) for i in range(own)]
    seated = [0] * count
    for seat in (*rank_seats, *engine_seats):
        seated[seat.bundle] += 1
    bundles = [{"CPU": float(n), **({resource: 1.0} if resource else {})} for n in seated]
    return Plan(tuple(bundles), tuple(rank_seats), tuple(engine_seats), resource)


def _share(resource: str | None, shared: bool) -> float:
    if resource is None:
        return 0.0
    return 0.5 if shared else 1.0

"""Which process runs on which device: pure arithmetic, asked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.cluster.config import ClusterConfig

_RESOURCES: Mapping[str, str] = {"cuda": "GPU", "npu": "NPU"}


@dataclass(frozen=True)
class Seat:
    """Where a process runs.

    Attributes:
        bundle: index of the placement group's bundle, which lies on one host.
        devices: of the bundle's devices, what Ray reserves for it; 0 on a CPU.
        shared: a trainer rank and an engine take turns there.
        ranks: of an engine of several devices that it shares: the ranks that have them. Ray reserves them for
            the ranks, and the engine is told which they are.
    """

    bundle: int
    devices: float
    shared: bool
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Every process has a seat; a bundle has one device, or all devices of one engine.

    Attributes:
        bundles: what each bundle of the placement group asks of Ray.
        ranks: seats of the trainer ranks, in order; bundles 0, 1, ... so that they lie side by side.
        engines: seats of the engines, in order.
        tasks: seats of the tasks that judge completions, each for one at a time.
        resource: Ray's name of the devices; None on CPUs.
    """

    bundles: tuple[Mapping[str, float], ...]
    ranks: tuple[Seat, ...]
    engines: tuple[Seat, ...]
    tasks: tuple[Seat, ...]
    resource: str | None

    @property
    def shared_engines(self) -> int:
        """How many engines, the first ones, share the devices of ranks."""
        return sum(seat.shared for seat in self.engines)


def plan_placement(config: ClusterConfig, device: str, engine_devices: int = 1, tasks: int = 0) -> Plan:
    """Seats for `config.trainer_ranks` ranks, `config.engines` engines and tasks on CPUs.

    colocate: an engine shares the devices of as many ranks as it has devices, the first one those of the
    first ranks, and so on. async: every process has devices of its own. hybrid: the first engines share the
    ranks' devices, and the others have their own. All devices of an engine are on one host. On a CPU there
    is nothing to share but cores, and any numbers go together.

    Args:
        config: numbers and placement.
        device: name of the device, such as "cuda".
        engine_devices: devices of one engine.
        tasks: how many judge completions at the same time.

    Raises:
        ValueError: engines and ranks cannot share their devices.
    """
    resource = _RESOURCES.get(device, None if device == "cpu" else device.upper())
    ranks, engines = config.trainer_ranks, config.engines
    each = engine_devices if resource is not None else 1
    if config.placement == "colocate" and resource is not None and engines * each > ranks:
        several = f" with {each} devices each" if each > 1 else ""
        fitting = f"set cluster.engines to at most {ranks // each}, or " if ranks >= each else "set "
        raise ValueError(
            f"cluster.engines is {engines}{several} and cluster.trainer_ranks {ranks}: with placement "
            f"colocate every engine shares the devices of ranks; {fitting}cluster.placement to async"
        )
    sharing = {"colocate": engines, "async": 0, "hybrid": min(engines, ranks // each)}[config.placement]
    rank_seats, engine_seats = [], []
    bundles: list[dict[str, float]] = []

    def reserve(processes: int, devices: int) -> int:
        owned = {resource: float(devices)} if resource and devices else {}
        bundles.append({"CPU": float(processes), **owned})
        return len(bundles) - 1

    for number in range(sharing):
        mine = tuple(range(number * each, min((number + 1) * each, ranks)))
        bundle = reserve(len(mine) + 1, each)
        share = (0.5 if each == 1 else 1.0) if resource else 0.0
        rank_seats += [Seat(bundle, share if mine else 0.0, True) for _ in mine]
        engine_seats.append(
            Seat(bundle, 0.5, True) if each == 1 and resource else Seat(bundle, 0.0, True, mine)
        )
    alone = 1.0 if resource else 0.0
    rank_seats += [Seat(reserve(1, 1), alone, False) for _ in range(ranks - len(rank_seats))]
    engine_seats += [Seat(reserve(1, each), alone * each, False) for _ in range(engines - sharing)]
    task_seats = tuple(Seat(reserve(1, 0), 0.0, False) for _ in range(tasks))
    return Plan(tuple(bundles), tuple(rank_seats), tuple(engine_seats), task_seats, resource)

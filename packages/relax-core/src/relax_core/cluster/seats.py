"""The seats of a `Plan` as Ray takes them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_core.cluster.errors import ClusterError
from relax_core.cluster.plan import Plan, Seat

_log = logging.getLogger(__name__)


class Seats:
    """Options of actors by role.

    Args:
        plan: where each runs.
        group: the placement group of the plan's bundles.
    """

    def __init__(self, plan: Plan, group: Any) -> None:
        self._plan = plan
        self._group = group

    def rank(self, number: int) -> dict[str, Any]:
        """Of trainer rank `number`."""
        return self._options(self._plan.ranks[number])

    def engine(self, number: int) -> dict[str, Any]:
        """Of engine `number`."""
        return self._options(self._plan.engines[number])

    def tasks(self) -> list[dict[str, Any]]:
        """Of every task that may run beside the others."""
        return [self._options(seat) for seat in self._plan.tasks]

    def _options(self, seat: Seat) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=seat.bundle
            ),
        }
        if self._plan.resource == "GPU":
            options["num_gpus"] = seat.devices
        elif self._plan.resource is not None and seat.devices:
            options["resources"] = {self._plan.resource: seat.devices}
        return options

    @property
    def resource(self) -> str | None:
        """Ray's name of the devices."""
        return self._plan.resource

    def device_ranks(self, number: int) -> tuple[int, ...]:
        """The ranks that have the devices of engine `number`; empty if Ray gives it its own."""
        return self._plan.engines[number].ranks if self._plan.resource is not None else ()


def _require_hosts(plan: Plan) -> None:
    """Refuses at once what no waiting helps: a bundle that is larger than every host.

    Raises:
        ClusterError: there is one.
    """
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in dict.fromkeys(name for bundle in plan.bundles for name in bundle):
        wanted = max(bundle.get(name, 0) for bundle in plan.bundles)
        most = max((host.get(name, 0) for host in hosts), default=0)
        # Where no host has any yet, some may still come.
        if 0 < most < wanted:
            raise ClusterError(
                f"an engine, with the ranks that share its devices, needs {wanted:g} {name} on one host, and "
                f"the largest of {len(hosts)} has {most:g}: lower sglang.tensor, or take larger hosts"
            )


@contextmanager
def open_seats(plan: Plan, *, timeout_s: float) -> Iterator[Seats]:
    """Reserves what the plan asks for; gives it back.

    Args:
        plan: where each process runs.
        timeout_s: after which the cluster is taken to be too small, in seconds.

    Raises:
        ClusterError: the cluster does not have it.
    """
    _require_hosts(plan)
    group = placement_group([dict(bundle) for bundle in plan.bundles], strategy="PACK")
    try:
        if not group.wait(timeout_s):
            wanted = {name: sum(b.get(name, 0) for b in plan.bundles) for name in plan.bundles[0]}
            there = {n: v for n, v in ray.available_resources().items() if n in wanted}
            raise ClusterError(
                f"the run needs {wanted} and the cluster has {there or 'nothing'} free: lower "
                "cluster.trainer_ranks, cluster.engines or reward.concurrency, or take a larger cluster"
            )
        yield Seats(plan, group)
    finally:
        remove_placement_group(group)

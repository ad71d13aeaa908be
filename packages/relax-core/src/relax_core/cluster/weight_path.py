"""By which path the weights of a cluster's ranks come to its engines: what works is tried."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.engines import EngineGroup
from relax_core.cluster.errors import ClusterError
from relax_core.cluster.ranks import Ranks
from relax_core.config.root import RelaxConfig
from relax_core.loop.rollout import engine_devices

_log = logging.getLogger(__name__)

Path = Literal["ipc", "store", "broadcast", "disk"]
"""ipc: engines open the ranks' memory. store: Ray's shared memory, which it copies where hosts differ."""


@dataclass(frozen=True)
class WeightPath:
    """What was chosen.

    Attributes:
        path: how weights travel.
        why: for the log.
        sources: by engine, the ranks whose memory its processes open, one for all of them or one for each.
        engine_ranks: of an engine that cuts tensors as the trainer does: its ranks get the trainer's shares,
            and nothing is gathered. None sends whole tensors.
        gathered: names of tensors of which such an engine keeps more than the shares have.
    """

    path: Path
    why: str
    sources: Mapping[int, tuple[int, ...]]
    engine_ranks: int | None = None
    gathered: tuple[str, ...] = ()

    def without(self, names: Collection[str], why: str) -> "WeightPath":
        """The same path with these tensors whole."""
        if not names or set(names) <= set(self.gathered):
            return self.whole(why)
        _log.info("gathered before they travel: %s (%s)", ", ".join(names), why)
        return replace(self, gathered=(*self.gathered, *names))

    def whole(self, why: str) -> "WeightPath":
        """The same path for whole tensors."""
        _log.info("weights are gathered into whole tensors: %s", why)
        return replace(self, engine_ranks=None)


def memory_sources(cluster: ClusterConfig, device: str, each: int) -> dict[int, tuple[int, ...]]:
    """By engine, the ranks on whose devices it samples; on a CPU all share the first ranks' memory.

    Args:
        cluster: numbers and placement.
        device: name of the device, such as "cuda".
        each: devices of one engine.
    """
    if device == "cpu":
        first = tuple(range(each if each <= cluster.trainer_ranks else 1))
        return dict.fromkeys(range(cluster.engines), first)
    if cluster.placement != "colocate":
        return {}
    return {number: tuple(range(number * each, (number + 1) * each)) for number in range(cluster.engines)}


async def choose_path(config: RelaxConfig, device: str, ranks: Ranks, engines: EngineGroup) -> WeightPath:
    """The path that was asked for, or the first one that works; it is logged.

    Raises:
        ClusterError: `rollout.update_path` is ipc and no memory is shared.
    """
    chosen = await _choose(config, device, ranks, engines)
    by_store = "host" if config.rollout.update_path == "host" else "ipc (Ray's shared memory)"
    named = by_store if chosen.path == "store" else chosen.path
    _log.info("weights travel by %s: %s", named, chosen.why)
    return chosen


def equal_ranks(config: RelaxConfig, sources: Mapping[int, tuple[int, ...]]) -> int | None:
    """Ranks of an engine that has one for each tensor-parallel rank of a replica; None if they differ."""
    each, parallel = engine_devices(config), config.parallel
    alike = each > 1 and parallel.tensor == each and parallel.pipeline == 1
    # Megatron counts tensor-parallel ranks first, so the ranks that share a tensor follow one another.
    whole = all(len(own) == each and own[0] % each == 0 for own in sources.values())
    return each if alike and whole else None


async def _choose(config: RelaxConfig, device: str, ranks: Ranks, engines: EngineGroup) -> WeightPath:
    asked = config.rollout.update_path
    if asked in ("broadcast", "disk"):
        return WeightPath(asked, "as asked for", {})
    if asked == "host":
        return WeightPath("store", "as asked for", {})
    sources = memory_sources(config.cluster, device, engine_devices(config))
    if sources:
        offers = await asyncio.to_thread(ranks.call, "offer_memory")
        try:
            seen = await engines.see({n: [offers[rank] for rank in own] for n, own in sources.items()})
        finally:
            await asyncio.to_thread(ranks.call, "withdraw_memory")
        if seen:
            each = equal_ranks(config, sources)
            alike = "; each of its ranks takes the share of one of them" if each else ""
            why = f"every engine opens the memory of ranks on its devices{alike}"
            return WeightPath("ipc", why, sources, each)
    hosts = {*await asyncio.to_thread(ranks.call, "host"), *await engines.hosts()}
    if len(hosts) == 1:
        return WeightPath("store", "ranks and engines are on one host, and not on the same devices", {})
    if asked == "ipc":
        raise ClusterError(
            f"rollout.update_path is ipc, and ranks and engines are on {len(hosts)} hosts, which share no "
            "memory: set it to auto or broadcast"
        )
    if device != "cpu" and config.cluster.placement != "async":
        return WeightPath("store", "there are several hosts, and a collective takes one process a device", {})
    return WeightPath("broadcast", f"ranks and engines are on {len(hosts)} hosts", {})

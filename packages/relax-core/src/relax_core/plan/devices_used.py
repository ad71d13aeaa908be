"""Which process lies on which device, and how full that gets in each phase of a step."""

from collections.abc import Mapping

from relax_core.config.root import RelaxConfig
from relax_core.model.config import Qwen35Config
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import LEFT, EnginePlan
from relax_core.plan.result import DeviceUse
from relax_core.plan.trainer import TrainerPlan
from relax_core.plan.trainer_memory import RankMemory

BUCKETS = 2 * 512 * 2**20
"""A bucket of whole tensors that is packed, and one that is read (`relax_core.loop.weights`)."""


def devices_used(
    config: RelaxConfig,
    model: Qwen35Config,
    device: DeviceSpec,
    trainer: TrainerPlan,
    engine: EnginePlan | None,
) -> tuple[DeviceUse, ...]:
    """Every device of the run, trainer ranks first."""
    ranks, limit = config.cluster.trainer_ranks, int(device.memory - device.outside)
    per_stage = ranks // len(trainer.memory)
    shared = _shared_engines(config, engine)
    found = []
    for number in range(ranks):
        memory = trainer.memory[number // per_stage]
        own = engine if engine is not None and number < shared else None
        name = f"rank {number}" + (f" + engine {number // own.devices}" if own else "")
        found.append(_rank_use(name, config, memory, own, limit))
    if engine is not None:
        apart = config.cluster.engines * engine.devices - shared
        for number in range(apart):
            which = (shared + number) // engine.devices
            found.append(
                DeviceUse(f"engine {which}", engine.parts, "sampling", {"sampling": engine.size}, limit)
            )
    return tuple(found)


def _shared_engines(config: RelaxConfig, engine: EnginePlan | None) -> int:
    """Devices that an engine shares with a rank."""
    if engine is None:
        return 0
    ranks, wanted = config.cluster.trainer_ranks, config.cluster.engines * engine.devices
    return {"colocate": min(ranks, wanted), "hybrid": min(ranks, wanted), "async": 0}[
        config.cluster.placement
    ]


def _rank_use(
    name: str,
    config: RelaxConfig,
    memory: RankMemory,
    engine: EnginePlan | None,
    limit: int,
) -> DeviceUse:
    static: dict[str, int] = {
        kind: size for kind, size in memory.parts.items() if kind in ("weights", "gradients", "optimizer")
    }
    static["workspaces"] = memory.parts["workspaces"]
    static |= memory.beside
    training = memory.parts
    moments: dict[str, Mapping[str, int]] = {"training": training}
    if engine is not None:
        # An engine in the trainer's own process keeps its weights; a server gives up what it can.
        stays = (
            engine.weights + engine.tower + engine.draft if config.rollout.engine != "sglang" else int(LEFT)
        )
        moments["training"] = {**training, "engine, at rest": stays}
        moments["sampling"] = {**static, **engine.parts}
        moments["update"] = {**static, **engine.parts, "buckets": BUCKETS}
    phases = {phase: sum(parts.values()) for phase, parts in moments.items()}
    fullest = max(phases, key=lambda phase: phases[phase])
    return DeviceUse(name, moments[fullest], fullest, phases, limit)

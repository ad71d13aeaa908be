"""Which process lies on which device, and how full that gets in each phase of a step."""

from collections.abc import Mapping

from relax_core.config.root import RelaxConfig
from relax_core.model.config import Qwen35Config
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import LEFT, EnginePlan
from relax_core.plan.result import DeviceUse
from relax_core.plan.trainer import TrainerPlan
from relax_core.plan.trainer_memory import RankMemory
from relax_core.plan.update_memory import UpdateMemory, update_memory


def devices_used(
    config: RelaxConfig,
    model: Qwen35Config,
    device: DeviceSpec,
    trainer: TrainerPlan,
    engine: EnginePlan | None,
) -> tuple[DeviceUse, ...]:
    """Every device of the run, trainer ranks first."""
    ranks, limit = config.cluster.trainer_ranks, int(device.memory - device.outside)
    update = update_memory(config, model) if engine is not None else None
    if config.rollout.urls:
        # Those servers have devices of their own.
        engine = None
    per_stage = ranks // len(trainer.memory)
    shared = _shared_devices(config, engine)
    found = []
    for number in range(ranks):
        memory = trainer.memory[number // per_stage]
        own = engine if engine is not None and number < shared else None
        name = f"rank {number}" + (f" + engine {number // own.devices}" if own else "")
        moments = _rank_moments(config, memory, own, update)
        found.append(_use(name, moments, limit))
    if engine is not None:
        assert update is not None
        moments = {
            "sampling": engine.parts,
            "update": {**engine.parts, "new version": update.staged},
        }
        for number in range(shared, config.cluster.engines * engine.devices):
            found.append(_use(f"engine {number // engine.devices}", moments, limit))
    return tuple(found)


def _use(name: str, moments: Mapping[str, Mapping[str, int]], limit: int) -> DeviceUse:
    phases = {phase: sum(parts.values()) for phase, parts in moments.items()}
    fullest = max(phases, key=lambda phase: phases[phase])
    return DeviceUse(name, moments[fullest], fullest, phases, limit)


def _shared_devices(config: RelaxConfig, engine: EnginePlan | None) -> int:
    """Devices that an engine shares with a rank (`relax_core.cluster.plan`)."""
    if engine is None or config.cluster.placement == "async":
        return 0
    whole = config.cluster.trainer_ranks // engine.devices
    if config.cluster.mode != "ray":
        # The first device is the first rank's; an engine of several takes the next ones too.
        return min(config.cluster.trainer_ranks, engine.devices)
    return min(config.cluster.engines, whole) * engine.devices


def _rank_moments(
    config: RelaxConfig, memory: RankMemory, engine: EnginePlan | None, update: UpdateMemory | None
) -> dict[str, Mapping[str, int]]:
    """Parts of a rank's device in each phase."""
    static: dict[str, int] = {
        kind: size
        for kind, size in memory.parts.items()
        if kind in ("weights", "gradients", "optimizer", "workspaces")
    }
    static |= memory.beside
    training = memory.parts
    if update is None:
        return {"training": training}
    if engine is None:
        return {"training": training, "update": {**static, "buckets": update.passing}}
    packed = {"packed weights": update.packed}
    passing = {"buckets": update.passing, "new version": update.staged}
    return {
        "training": {**training, **packed, **_at_rest(config, engine)},
        "sampling": {**static, **packed, **engine.parts},
        "update": {**static, **packed, **engine.parts, **passing},
    }


def _at_rest(config: RelaxConfig, engine: EnginePlan) -> Mapping[str, int]:
    """What an engine on a rank's device holds while the rank trains: on Ray it gives up what it can."""
    embedded = config.rollout.engine != "sglang"
    if config.cluster.mode == "ray":
        return {"engine, at rest": 0 if embedded else LEFT}
    return {"engine, at rest": engine.weights + engine.tower if embedded else engine.size}

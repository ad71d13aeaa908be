"""Which process lies on which device, and how full that gets in each phase of a step."""

from collections.abc import Iterator, Mapping, Sequence

from relax_core.config.problems import Problem
from relax_core.config.root import RelaxConfig
from relax_core.model.config import Qwen35Config
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import LEFT, EnginePlan
from relax_core.plan.result import DeviceUse
from relax_core.plan.trainer import TrainerPlan
from relax_core.plan.trainer_memory import RankMemory
from relax_core.plan.workload import Workload

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


def memory_problems(
    config: RelaxConfig,
    device: DeviceSpec,
    uses: Sequence[DeviceUse],
    engine: EnginePlan | None,
    workload: Workload,
) -> Iterator[Problem]:
    """What does not fit, with what would."""
    if engine is not None and engine.rows < 1:
        yield Problem(
            ("sglang", "memory_fraction"),
            f"the engine's weights and states leave no room for the keys and values of one sequence on "
            f"{device.name}",
            given=str(config.sglang.memory_fraction),
            allowed="a larger share, more devices for an engine (sglang.tensor), or fewer sglang.states",
        )
    over = [use for use in uses if use.peak > use.limit]
    if not over:
        return
    worst = max(over, key=lambda use: use.peak)
    gib = 2**30
    reason = (
        f"{worst.name} needs {worst.peak / gib:.1f} GiB while {worst.phase}, and {device.name} has "
        f"{worst.limit / gib:.1f} GiB for it ({', '.join(_largest(worst.parts))})"
    )
    path, given, allowed = _remedy(config, worst)
    yield Problem(path, reason, given=given, allowed=allowed)


def _largest(parts: Mapping[str, int]) -> list[str]:
    top = sorted(parts.items(), key=lambda item: -item[1])[:4]
    return [f"{name} {size / 2**30:.1f}" for name, size in top]


def _remedy(config: RelaxConfig, use: DeviceUse) -> tuple[tuple[str, ...], str, str]:
    """The setting that most likely has to change, its value, and one that works."""
    room = use.limit - (use.peak - use.parts.get("keys and values", 0) - use.parts.get("states", 0))
    if use.phase != "training" and config.rollout.engine == "sglang" and room > 0:
        total = use.limit
        engine = sum(
            use.parts.get(kind, 0)
            for kind in ("engine weights", "engine tower", "draft weights", "states", "keys and values")
        )
        fraction = (engine - (use.peak - use.limit)) / total
        return (
            ("sglang", "memory_fraction"),
            str(config.sglang.memory_fraction),
            f"at most {max(0.0, int(fraction * 95) / 100):.2f}, so that the trainer's memory, which stays, "
            "has room beside it",
        )
    trainer = config.trainer
    if trainer.recompute != "full" and use.phase == "training":
        better = "selective" if trainer.recompute == "none" else "full"
        return (
            ("trainer", "recompute"),
            trainer.recompute,
            f"{better}, or a smaller trainer.micro_batch_tokens",
        )
    if trainer.moment_precision == "fp32":
        return (
            ("trainer", "moment_precision"),
            "fp32",
            "bf16, and trainer.gradient_precision bf16: 10 bytes a weight instead of 16",
        )
    return (
        ("parallel", "tensor"),
        str(config.parallel.tensor),
        "more ranks for a model (parallel.tensor, parallel.pipeline), or a smaller "
        "trainer.micro_batch_tokens",
    )

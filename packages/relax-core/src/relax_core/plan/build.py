"""`plan`: from settings, sizes and a table of devices to memory and time. No device is touched."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from relax_core.config.root import RelaxConfig
from relax_core.config.rules.shapes import shape_problems
from relax_core.loop.update_path import expected_path
from relax_core.model.config import Qwen35Config
from relax_core.model.vision.config import VisionConfig
from relax_core.plan.devices import DEFAULTS, DeviceSpec, device_spec
from relax_core.plan.devices_used import devices_used
from relax_core.plan.engine_memory import EnginePlan, Servers, plan_embedded, plan_servers
from relax_core.plan.engine_time import RolloutTime, rollout_time
from relax_core.plan.remedy import Memory, memory_problems
from relax_core.plan.result import Plan
from relax_core.plan.shapes import model_facts
from relax_core.plan.sizes import model_sizes, trained_model
from relax_core.plan.trainer import TrainerPlan, plan_trainer
from relax_core.plan.trainer_memory import Beside
from relax_core.plan.update_memory import way_of_weights
from relax_core.plan.workload import Workload

HOST_RATE = 1.2e9
"""Bytes a second of a checkpoint through a host's memory, as files (benchmarks/weights, an H200's host)."""


def plan(
    config: RelaxConfig,
    *,
    recipe: str = "",
    device: str | None = None,
    facts: Mapping[str, Any] | None = None,
    workload: Workload | None = None,
) -> Plan:
    """Memory and time of a run.

    Args:
        config: the resolved settings.
        recipe: their name, for the plan's title.
        device: name in the table of devices; None takes the usual one of `run.device`.
        facts: the model's `config.json`; None looks at `model.path`.
        workload: the samples; None assumes them from the settings.

    Raises:
        ValueError: there is no such device in the table.
        UnknownModelError: the model's sizes cannot be found.
        UnsupportedModelError: the model cannot be trained.
    """
    spec = device_spec(device or DEFAULTS.get(config.run.device, DEFAULTS["auto"]))
    facts = model_facts(config.model.path) if facts is None else facts
    found = Qwen35Config.from_hf(facts, vision=config.model.vision != "absent")
    workload = workload or Workload.of(config)
    model = trained_model(found, config)
    total, active = model_sizes(model)
    problems = [*shape_problems(config, found)]
    trainer = engine = rollout = None
    if not problems:
        trainer = _trainer(config, model, spec, workload)
        if workload.sequences:
            engine = _engine(config, _engine_model(config, model, facts), spec, workload, trainer)
            rollout = _rollout(config, model, spec, workload, engine)
    uses = devices_used(config, model, spec, trainer, engine) if trainer else ()
    if trainer is not None:
        problems += memory_problems(config, spec, Memory(uses, engine), _reckon(found, facts, spec, workload))
    return Plan(
        recipe=recipe,
        model=config.model.path,
        parameters=total,
        active=active,
        device=spec,
        workload=workload,
        trainer=trainer,
        engine=engine,
        rollout=rollout,
        devices=uses,
        phases=_phases(config, model, spec, workload, trainer, rollout) if trainer else {},
        problems=tuple(problems),
        notes=(
            *_stand_in(config, spec, device),
            *_notes(config, spec, workload, rollout),
            *_start(config, recipe, spec, len(uses)),
        ),
    )


def _reckon(
    found: Qwen35Config, facts: Mapping[str, Any], spec: DeviceSpec, workload: Workload
) -> Callable[[RelaxConfig], Memory | None]:
    """What configs of the same samples take: a trainer is planned once for the same settings."""
    trainers: dict[object, TrainerPlan] = {}

    def reckon(config: RelaxConfig) -> Memory | None:
        if shape_problems(config, found):
            return None
        model = trained_model(found, config)
        sections = (config.trainer, config.parallel)
        key = (config.cluster.trainer_ranks, *(section.model_dump_json() for section in sections))
        if key not in trainers:
            trainers[key] = _trainer(config, model, spec, workload)
        engine = None
        if workload.sequences:
            engine = _engine(config, _engine_model(config, model, facts), spec, workload, trainers[key])
        return Memory(devices_used(config, model, spec, trainers[key], engine), engine)

    return reckon


def _trainer(config: RelaxConfig, model: Qwen35Config, device: DeviceSpec, workload: Workload) -> TrainerPlan:
    return plan_trainer(
        model,
        config.parallel,
        config.trainer,
        config.mtp,
        device,
        ranks=config.cluster.trainer_ranks,
        lengths=workload.lengths,
        scored=workload.scored,
        entropy=config.algorithm.algorithm.loop == "rl",
        vision=config.model.vision,
        picture_tokens=workload.picture_tokens,
        lora=config.lora if config.lora.rank else None,
        beside=_beside(config, model),
    )


def _beside(config: RelaxConfig, model: Qwen35Config) -> list[Beside]:
    """Further models of the trainer's ranks: a frozen reference or teacher, a critic that is trained.

    The reference that adapters can be left out for is the policy itself.
    """
    found = []
    own = config.model.reference_path
    if config.algorithm.needs_reference and not (config.lora.rank and own is None):
        found.append(Beside("reference", _sizes_of(own, config) if own else model))
    if config.teacher.path is not None:
        found.append(Beside("teacher", _sizes_of(config.teacher.path, config)))
    if config.algorithm.algorithm.needs_critic:
        path = config.critic.path
        found.append(Beside("critic", _sizes_of(path, config) if path else model, trained=True))
    return found


def _sizes_of(path: str, config: RelaxConfig) -> Qwen35Config:
    return Qwen35Config.from_hf(model_facts(path), vision=config.model.vision != "absent")


def _engine_model(config: RelaxConfig, model: Qwen35Config, facts: Mapping[str, Any]) -> Qwen35Config:
    """The model as an engine holds it: servers load a checkpoint's tower, seen through or not."""
    if config.rollout.engine == "sglang" and "vision_config" in facts:
        return replace(model, vision=VisionConfig.read(facts["vision_config"]))
    return model


def _engine(
    config: RelaxConfig, model: Qwen35Config, device: DeviceSpec, workload: Workload, trainer: TrainerPlan
) -> EnginePlan:
    rollout, sglang = config.rollout, config.sglang
    embedded = rollout.engine != "sglang"
    engines = config.cluster.engines * (1 if embedded else rollout.servers)
    rows = min(rollout.max_batch_size, ceil(workload.sequences / engines))
    if embedded:
        return plan_embedded(model, rows=rows, length=workload.prompt_tokens + workload.longest)
    return plan_servers(
        model,
        device,
        Servers(
            sglang.memory_fraction,
            sglang.states,
            sglang.max_tokens,
            sglang.prefill_tokens,
            max(sglang.graph_batches, default=None),
            sglang.radix_cache,
        ),
        devices=sglang.tensor,
        rows=rows,
        most_rows=rollout.max_batch_size,
        length=workload.prompt_tokens + workload.new_tokens,
        draft_tokens=rollout.draft_tokens,
        # On Ray ranks load when they are first called, which is when the engines are there.
        taken=trainer.memory[0].static if config.cluster.mode != "ray" and not rollout.urls else 0,
    )


def _rollout(
    config: RelaxConfig, model: Qwen35Config, device: DeviceSpec, workload: Workload, engine: EnginePlan
) -> RolloutTime | None:
    if engine.rows < 1:
        return None
    return rollout_time(
        model,
        device,
        engine,
        engines=config.cluster.engines * config.rollout.servers,
        sequences=workload.sequences,
        prompts=workload.prompts,
        prompt_length=workload.prompt_tokens,
        new_tokens=workload.new_tokens,
        longest=workload.longest,
        draft_tokens=config.rollout.draft_tokens,
    )


def _phases(
    config: RelaxConfig,
    model: Qwen35Config,
    device: DeviceSpec,
    workload: Workload,
    trainer: TrainerPlan,
    rollout: RolloutTime | None,
) -> dict[str, float]:
    """Seconds of a step by phase; "step" is what passes in all."""
    # A critic of the same trunk takes steps like the policy's.
    train = (
        trainer.time.total * workload.optimizer_steps * (2 if config.algorithm.algorithm.needs_critic else 1)
    )
    score = 0.0
    if workload.forwards:
        passes = workload.optimizer_steps * workload.forwards
        score = (trainer.time.forward.total * trainer.batch.micro_batches) * passes
    if rollout is None:
        return {"train": train, "score": score, "step": train + score}
    total, _active = model_sizes(model)
    # Whole tensors come together on every rank and pass to the engines: once over a link each, or through the
    # host's memory, where they are written, read and copied to a device.
    rate = HOST_RATE if way_of_weights(config) == "host" else device.link * device.shares.link / 2
    update = 2 * total / rate
    phases = {"sampling": rollout.total, "score": score, "train": train, "update": update}
    beside = config.cluster.placement != "colocate"
    hidden = max(rollout.total, score + train) if beside else rollout.total + score + train
    return {**phases, "step": hidden + update}


def _stand_in(config: RelaxConfig, spec: DeviceSpec, asked: str | None) -> tuple[str, ...]:
    """Says so where the device planned on is not the one that the run names."""
    if asked is not None or config.run.device in ("cuda", "npu"):
        return ()
    return (
        f"assumed: {spec.name}s, for run.device {config.run.device} names no device of the plan's table; "
        "--plan-device takes another",
    )


def _start(config: RelaxConfig, recipe: str, device: DeviceSpec, count: int) -> tuple[str, ...]:
    """How a run on Ray is started, by the hosts that its devices need."""
    if config.cluster.mode != "ray" or not recipe:
        return ()
    command, hosts = f"relax-train --recipe {recipe}", ceil(count / device.per_host)
    if config.cluster.address is not None:
        return (f"start: {command}, which joins the Ray at {config.cluster.address}",)
    if hosts <= 1:
        return (f"start: {command}, which starts a Ray of its own on this host or joins RAY_ADDRESS",)
    return (
        f"start: ray start --head on the first of {hosts} hosts of {device.per_host} devices, ray start "
        f"--address HEAD:6379 on the others, then ray job submit --working-dir . -- {command}",
    )


def _notes(
    config: RelaxConfig, device: DeviceSpec, workload: Workload, rollout: RolloutTime | None
) -> list[str]:
    notes = [f"assumed: {words}" for words in workload.words]
    notes.append(f"figures of {device.name}: {device.source}")
    if not device.shares.measured:
        notes.append(
            f"assumed: on {device.name} operators reach the shares of its rates that were measured on an H200"
        )
    if workload.sequences:
        notes.append(expected_path(config))
    notes.append("not reckoned: rewards, evaluation, checkpoints, reading data")
    talk = rollout.speculation if rollout else None
    if talk is not None:
        asked = config.rollout.draft_tokens
        verdict = f"{talk.speedup:.2f} times the tokens a second"
        below = f"; it pays up to {talk.pays_below} rows an engine" if talk.pays_below else "; it never pays"
        if asked:
            notes.append(f"drafting {asked} tokens should give {verdict}{below}")
            if talk.speedup < 1.05:
                notes.append("advice: set rollout.draft_tokens to 0, drafting does not pay at this size")
        else:
            notes.append(f"without drafts; rollout.draft_tokens {talk.tokens} should give {verdict}{below}")
        notes.append(f"assumed: {talk.acceptance:.0%} of drafts stand; a run measures it")
    return notes

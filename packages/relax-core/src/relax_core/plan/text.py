"""A plan as lines for a terminal, and as plain values for `--json`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from relax_core.plan.devices import GIB
from relax_core.plan.fields import VERSION
from relax_core.plan.result import DeviceUse, Plan

KINDS = (
    "weights", "gradients", "optimizer", "reference", "teacher", "critic", "activations", "working",
    "communication", "workspaces", "engine weights", "engine tower", "draft weights", "states",
    "keys and values", "engine, other", "engine, at rest", "packed weights", "buckets", "new version",
)  # fmt: skip
"""Kinds of memory, in the order in which they are shown."""


def groups(plan: Plan) -> list[tuple[str, DeviceUse]]:
    """Devices that are alike, once: (their names, one of them)."""
    found: dict[tuple[object, ...], tuple[list[str], DeviceUse]] = {}
    for use in plan.devices:
        key = (use.name.split()[0], tuple(use.parts.items()), use.phase)
        found.setdefault(key, ([], use))[0].append(use.name)
    return [(_joined(names), use) for names, use in found.values()]


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan for a person."""
    count = len(plan.devices)
    yield f"Plan of {plan.recipe or 'a run'}" + (f" on {count} x {plan.device.name}" if count else "")
    used = f", {plan.active / 1e9:.2f} billion used by a token" if plan.active != plan.parameters else ""
    yield f"  model     {plan.model}, {plan.parameters / 1e9:.2f} billion weights{used}"
    if plan.trainer is not None:
        yield from _trainer_lines(plan)
        yield from _memory_lines(plan)
        yield from _time_lines(plan)
    for note in plan.notes:
        yield f"  {note}"
    if plan.problems:
        yield f"Refused: {len(plan.problems)} problem{'s' * (len(plan.problems) != 1)}"
        for problem in plan.problems:
            yield str(problem)


def _trainer_lines(plan: Plan) -> Iterator[str]:
    assert plan.trainer is not None
    layout, batch = plan.trainer.layout, plan.trainer.batch
    axes = ("tensor", "context", "pipeline", "expert", "data")
    sizes = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    yield f"  layout    {layout.ranks} ranks: {', '.join(sizes) or 'one replica'}"
    yield (
        f"  rows      {batch.micro_batches} micro-batches a rank of {batch.mean_row:.0f} tokens, "
        f"{batch.longest_row} at most; work of the busiest replica {batch.balance:.3f} of the mean"
    )
    if plan.engine is not None:
        yield (
            f"  engines   {plan.engine.rows} sequences at once on {plan.engine.devices} "
            f"device{'s' * (plan.engine.devices > 1)}, {plan.engine.cached_tokens} tokens cached"
        )


def _memory_lines(plan: Plan) -> Iterator[str]:
    if not plan.devices:
        return
    limit = plan.devices[0].limit / GIB
    yield f"Memory, GiB ({limit:.1f} a device without runtime and collectives' buffers)"
    for names, use in groups(plan):
        phases = ", ".join(f"{phase} {size / GIB:.1f}" for phase, size in use.phases.items())
        over = "   TOO MUCH" if use.peak > use.limit else ""
        yield f"  {names}: {phases}{over}"
        shown = [f"{kind} {use.parts[kind] / GIB:.2f}" for kind in KINDS if use.parts.get(kind)]
        yield f"      {use.phase}: {', '.join(shown)}"
    assert plan.trainer is not None
    for memory in plan.trainer.memory:
        stage = f"stage {memory.stage}" if len(plan.trainer.memory) > 1 else "activations"
        kinds = sorted(memory.activations.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds if size)
        yield f"      {stage}, {memory.in_flight} micro-batch at once: {listed}; fullest in {memory.at}"


def _time_lines(plan: Plan) -> Iterator[str]:
    assert plan.trainer is not None
    time = plan.trainer.time
    phases = [f"{name} {seconds:.1f}" for name, seconds in plan.phases.items() if name != "step" and seconds]
    yield f"Time of a step, s: {plan.step_seconds:.1f} ({', '.join(phases)})"
    kinds: dict[str, float] = {}
    for one in (time.forward, time.backward):
        for kind, seconds in one.kinds.items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds * time.micro_batches
    kinds |= {"bubble": time.bubble, "reduction": time.reduce, "optimizer": time.optimizer}
    shown = [
        f"{kind} {1e3 * s:.0f}" for kind, s in sorted(kinds.items(), key=lambda item: -item[1]) if s > 5e-4
    ]
    yield f"  optimizer step, ms: {1e3 * time.total:.0f} ({', '.join(shown)})"
    rate = time.flops / time.total / plan.device.flops
    yield (
        f"  training {plan.trainer.tokens_per_second:.0f} tokens/s, {rate:.0%} of the matrix rate; in all "
        f"{plan.tokens_per_step / max(1e-9, plan.step_seconds):.0f} tokens/s"
    )
    if plan.rollout is not None:
        yield (
            f"  sampling {plan.rollout.tokens_per_second:.0f} tokens/s, a decoding step "
            f"{1e3 * plan.rollout.step:.1f} ms"
        )
    hours = plan.step_seconds * len(plan.devices) / 3600
    yield f"Cost: {hours:.3f} device-hours a step"


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes, seconds and tokens. `relax_core.plan.fields` says what each is."""
    trainer, rollout, engine = plan.trainer, plan.rollout, plan.engine
    spec = plan.device
    shares = asdict(spec.shares)
    measured = shares.pop("measured")
    values: dict[str, Any] = {
        "version": VERSION,
        "recipe": plan.recipe,
        "model": plan.model,
        "parameters": plan.parameters,
        "active_parameters": plan.active,
        "device": spec.name,
        "device_figures": {
            "memory": int(spec.memory),
            "flops": spec.flops,
            "bandwidth": spec.bandwidth,
            "link": spec.link,
            "network": spec.network,
            "shares": shares,
            "measured": measured,
            "source": spec.source,
        },
        "fits": plan.fits and not plan.problems,
        "devices": [
            {
                "name": use.name,
                "fullest": use.phase,
                "parts": dict(use.parts),
                "phases": dict(use.phases),
                "limit": use.limit,
            }
            for use in plan.devices
        ],
        "phases_s": dict(plan.phases),
        "tokens_per_step": plan.tokens_per_step,
        "device_seconds_per_step": plan.step_seconds * len(plan.devices),
        "problems": [
            {
                "field": ".".join(problem.path),
                "reason": problem.message,
                "given": problem.given,
                "allowed": problem.allowed,
                "nearest": problem.nearest,
            }
            for problem in plan.problems
        ],
        "notes": list(plan.notes),
    }
    if trainer is not None:
        values["trainer"] = {
            "layout": asdict(trainer.layout),
            "micro_batches": trainer.batch.micro_batches,
            "longest_row": trainer.batch.longest_row,
            "balance": trainer.batch.balance,
            "step_s": trainer.time.total,
            "bubble_s": trainer.time.bubble,
            "flops_per_rank": trainer.time.flops,
            "tokens_per_s": trainer.tokens_per_second,
            "stages": [
                {
                    "weights": dict(memory.weights),
                    "gradients": dict(memory.gradients),
                    "optimizer": dict(memory.optimizer),
                    "activations": dict(memory.activations),
                    "beside": dict(memory.beside),
                    "working": memory.working,
                    "communication": memory.communication,
                    "in_flight": memory.in_flight,
                    "fullest_in": memory.at,
                }
                for memory in trainer.memory
            ],
        }
    if engine is not None:
        values["engine"] = {
            "devices": engine.devices,
            "parts": engine.parts,
            "rows": engine.rows,
            "cached_tokens": engine.cached_tokens,
            "state_bytes": engine.state_bytes,
            "token_bytes": engine.token_bytes,
        }
    if rollout is not None:
        talk = rollout.speculation
        values["rollout"] = {
            "prefill_s": rollout.prefill,
            "decode_s": rollout.decode,
            "decoding_step_s": rollout.step,
            "tokens_per_s": rollout.tokens_per_second,
            "drafting": None
            if talk is None
            else {
                "tokens": talk.tokens,
                "acceptance": talk.acceptance,
                "tokens_per_step": talk.per_step,
                "speedup": talk.speedup,
                "pays_up_to_rows": talk.pays_below,
            },
        }
    return values


def _joined(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    first, last = names[0].split(), names[-1].split()
    return " ".join(a if a == b or not b.isdigit() else f"{a}-{b}" for a, b in zip(first, last, strict=True))

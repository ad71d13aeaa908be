"""What does not fit a device, and the nearest settings that do: changes are tried, the mildest first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from pydantic import ValidationError

from relax_core.config.problems import Problem
from relax_core.config.root import RelaxConfig
from relax_core.config.yaml_text import show
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import EnginePlan
from relax_core.plan.result import DeviceUse

Change = Mapping[tuple[str, str], object]
"""Settings that are changed together: section and field, and the new value."""

_ROOMY = {("trainer", "moment_precision"): "bf16", ("trainer", "gradient_precision"): "bf16"}
_RECOMPUTE = ("none", "selective", "full")
_FULL = {("trainer", "recompute"): "full"}
_BY_HOST = {("rollout", "update_path"): "host"}


@dataclass(frozen=True)
class Memory:
    """What a config takes.

    Attributes:
        uses: every device.
        engine: one engine; None without sampling.
    """

    uses: Sequence[DeviceUse]
    engine: EnginePlan | None

    @property
    def starved(self) -> bool:
        """Whether an engine has no room for the keys and values of one sequence."""
        return self.engine is not None and self.engine.rows < 1

    @property
    def over(self) -> list[DeviceUse]:
        """Devices with less memory than they need."""
        return [use for use in self.uses if use.peak > use.limit]

    @property
    def fits(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.starved and not self.over


def memory_problems(
    config: RelaxConfig, device: DeviceSpec, found: Memory, reckon: Callable[[RelaxConfig], Memory | None]
) -> Iterator[Problem]:
    """What does not fit, with the nearest that does.

    Args:
        config: the run's.
        device: what it runs on.
        found: what the config takes.
        reckon: what another config takes; None where other rules refuse it.
    """
    if found.fits:
        return
    change = nearest_change(config, found, reckon)
    reasons = []
    if found.starved:
        reasons.append(
            "the engine's weights and states leave no room for the keys and values of one sequence on "
            f"{device.name}"
        )
    if found.over:
        worst = max(found.over, key=lambda use: use.peak)
        reasons.append(
            f"{worst.name} needs {worst.peak / 2**30:.1f} GiB while {worst.phase}, and {device.name} has "
            f"{worst.limit / 2**30:.1f} GiB for it ({', '.join(_largest(worst.parts))})"
        )
    if change is None:
        path = ("sglang", "memory_fraction") if found.starved else ("cluster", "trainer_ranks")
        yield Problem(
            path,
            "; ".join(reasons),
            given=show(getattr(getattr(config, path[0]), path[1])),
            allowed="devices with more memory: none of the changes of recomputation, precision, rows, ranks "
            "and shares of memory that were tried fits",
        )
        return
    path, *_ = change
    given = show(getattr(getattr(config, path[0]), path[1]))
    yield Problem(
        path, "; ".join(reasons), given=given, allowed=_allowed(found, change), nearest=_nearest(change)
    )


def nearest_change(
    config: RelaxConfig, found: Memory, reckon: Callable[[RelaxConfig], Memory | None]
) -> Change | None:
    """The first change of those tried after which everything has room.

    The engines' share of memory is tried first, alone and then after every change of the trainer: nothing is
    computed twice or rounded for it.
    """
    for change in chain([{}], _trainer_changes(config, found)):
        changed = apply(config, change)
        memory = found if not change else reckon(changed) if changed is not None else None
        if changed is None or memory is None:
            continue
        if memory.fits:
            return change
        if memory.engine is None or config.rollout.engine != "sglang":
            continue
        if any(use.phases.get("training", 0) > use.limit for use in memory.uses):
            continue
        share = _share_that_fits(changed, memory.engine.share or 0.0, reckon)
        if share is not None:
            return {("sglang", "memory_fraction"): share, **change}
    return None


def apply(config: RelaxConfig, change: Change) -> RelaxConfig | None:
    """The config with a change; None where the rules refuse it."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    try:
        for section in {name for name, _ in change}:
            new = {field: value for (name, field), value in change.items() if name == section}
            was = sections[section]
            sections[section] = type(was).model_validate({**was.model_dump(), **new})
        return RelaxConfig.model_validate(sections)
    except ValidationError:
        return None


def _share_that_fits(
    config: RelaxConfig, given: float, reckon: Callable[[RelaxConfig], Memory | None]
) -> float | None:
    """The share of a device for an engine, in hundredths, nearest to the one given."""
    for hundredths in sorted(range(1, 100), key=lambda share: abs(share / 100 - given)):
        changed = apply(config, {("sglang", "memory_fraction"): hundredths / 100})
        memory = None if changed is None else reckon(changed)
        if memory is not None and memory.fits:
            return hundredths / 100
    return None


def _trainer_changes(config: RelaxConfig, found: Memory) -> Iterator[Change]:
    """Changes from the mildest on; servers of a single process keep their memory while it trains, so that
    each is tried on Ray too, where they give it up."""
    rollout = config.rollout
    if config.cluster.mode == "ray" or rollout.engine != "sglang" or rollout.urls:
        yield from _changes(config, found)
        return
    apart: Change = {("cluster", "mode"): "ray"}
    yield apart
    for change in _changes(config, found):
        yield change
        yield {**change, **apart}


def _changes(config: RelaxConfig, found: Memory) -> Iterator[Change]:
    """Weights by the host's memory, more computed again, shorter rows, numbers of two bytes, more ranks."""
    trainer, ranks = config.trainer, config.cluster.trainer_ranks
    if found.starved and (config.sglang.states or 0) > config.rollout.max_batch_size:
        yield {("sglang", "states"): config.rollout.max_batch_size}
    if any(use.parts.get("packed weights") for use in found.over):
        yield _BY_HOST
    again = _RECOMPUTE[_RECOMPUTE.index(trainer.recompute) + 1 :]
    yield from ({("trainer", "recompute"): how} for how in again)
    shorter = [trainer.micro_batch_tokens * part // 8 for part in range(7, 0, -1)]
    training = any(use.phase == "training" for use in found.over)
    if training:
        yield from ({("trainer", "micro_batch_tokens"): tokens} for tokens in shorter)
    yield from ({name: value} for name, value in _ROOMY.items())
    yield _ROOMY
    if again:
        yield {**_FULL, **_ROOMY}
    if training:
        yield from ({**_FULL, **_ROOMY, ("trainer", "micro_batch_tokens"): tokens} for tokens in shorter)
    for more in (1, 2, 4, 8):
        for change in _wider(config, ranks * more):
            yield change
            yield {**change, **_FULL, **_ROOMY}
            if config.rollout.engine == "sglang" and config.cluster.placement == "colocate":
                yield {**change, **_FULL, **_ROOMY, **_BY_HOST}


def _wider(config: RelaxConfig, ranks: int) -> Iterator[Change]:
    """More ranks for a model, on `ranks` of them in all: for the optimizer's state alone, for tensors, for
    experts, and for the engines."""
    wider: Change = {}
    if ranks != config.cluster.trainer_ranks:
        wider = {("cluster", "trainer_ranks"): ranks}
        if config.cluster.mode == "inline":
            wider = {**wider, ("cluster", "mode"): "ray"}
        yield wider
    sizes = [size for size in (2, 4, 8, 16) if size <= ranks]
    for tensor in sizes:
        if tensor > config.parallel.tensor:
            yield {("parallel", "tensor"): tensor, ("parallel", "sequence"): True, **wider}
    for expert in sizes:
        if expert > config.parallel.expert:
            yield {
                ("parallel", "expert"): expert,
                ("parallel", "expert_tensor"): 1,
                ("parallel", "sequence"): config.parallel.tensor > 1,
                **wider,
            }
    if config.rollout.engine == "sglang":
        for tensor in sizes:
            if tensor > config.sglang.tensor:
                yield {
                    ("sglang", "tensor"): tensor,
                    ("cluster", "engines"): max(1, min(config.cluster.engines, ranks // tensor)),
                    **wider,
                }


def _allowed(found: Memory, change: Change) -> str:
    (path, value), *more = change.items()
    text = show(value)
    if path == ("sglang", "memory_fraction"):
        lower = float(text) < ((found.engine.share if found.engine else None) or 0)
        text = (
            f"at {'most' if lower else 'least'} {text}, so that the engine and the trainer's memory, which "
        )
        text += "stays, have room together"
    if more:
        text += f", together with {', '.join(f'{a}.{b} {show(new)}' for (a, b), new in more)}"
    return text


def _nearest(change: Change) -> str:
    """As it stands behind the flag of the first setting; further ones are flags of their own."""
    (_, value), *more = change.items()
    return " ".join([show(value), *(f"--{a}.{b} {show(new)}" for (a, b), new in more)])


def _largest(parts: Mapping[str, int]) -> list[str]:
    top = sorted(parts.items(), key=lambda item: -item[1])[:4]
    return [f"{name} {size / 2**30:.1f}" for name, size in top]

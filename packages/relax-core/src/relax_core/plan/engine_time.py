"""Time of sampling: prefill by arithmetic, decoding by what a step reads, and what drafting would change."""

from dataclasses import dataclass

from relax_core.model.config import Qwen35Config
from relax_core.model.cost import sample_cost
from relax_core.plan.devices import DeviceSpec
from relax_core.plan.engine_memory import EnginePlan

STEP_SECONDS = {"cuda": 2e-3, "npu": 5e-3}
"""What a decoding step takes beside reading and arithmetic: launching its graph, sampling, the scheduler (an
assumption)."""
ACCEPTANCE = 0.65
"""Drafts of Qwen3.5's own draft layer that stand (65.8 % at one deeper, on captions; the reference system's
figure for the released checkpoint)."""
MESSAGE_SECONDS = 10e-6
"""Of one small sum over the devices of an engine (an assumption)."""


@dataclass(frozen=True)
class Speculation:
    """What drafting `tokens` tokens a step would do.

    Attributes:
        tokens: drafted a step.
        acceptance: share that stands, assumed.
        per_step: tokens that a step gives on average.
        speedup: tokens a second over those without drafts, at the rows of the plan.
        pays_below: rows of an engine up to which it pays; 0 if it never does.
    """

    tokens: int
    acceptance: float
    per_step: float
    speedup: float
    pays_below: int


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of one step's sampling on every engine at once.

    Attributes:
        prefill, decode: seconds.
        step: of one decoding step at the mean number of rows.
        tokens_per_second: sampled, by all engines together.
        speculation: None where the model has no draft layer.
    """

    prefill: float
    decode: float
    step: float
    tokens_per_second: float
    speculation: Speculation | None

    @property
    def total(self) -> float:
        """Seconds of sampling."""
        return self.prefill + self.decode


def decode_step(
    model: Qwen35Config, device: DeviceSpec, engine: EnginePlan, *, rows: float, length: float, width: int = 1
) -> float:
    """Seconds of one step of `rows` sequences that hold `length` tokens each.

    Args:
        model, device, engine: what runs where.
        rows: sequences.
        length: tokens whose keys and values are read for each.
        width: tokens of each sequence computed at once: 1, or drafts and one more.
    """
    tokens = rows * width
    read = engine.weights * _share_of_weights(model, tokens)
    read += rows * (2 * engine.state_bytes * width + length * engine.token_bytes)
    flops = 2 * sample_cost(model).linear * tokens / engine.devices
    moving = read / (device.bandwidth * device.shares.memory)
    arithmetic = flops / (device.flops * device.shares.matmul)
    messages = 2 * model.num_layers * MESSAGE_SECONDS if engine.devices > 1 else 0.0
    return max(moving, arithmetic) + messages + STEP_SECONDS.get(device.kind, 2e-3)


def draft_step(model: Qwen35Config, device: DeviceSpec, engine: EnginePlan, *, rows: float) -> float:
    """Seconds of one drafted token of `rows` sequences: the draft layer and the head."""
    head = model.vocab_size * model.hidden_size * 2 / engine.devices
    moving = (engine.draft + head) / (device.bandwidth * device.shares.memory)
    flops = 2 * rows * (model.vocab_size + 12 * model.hidden_size) * model.hidden_size / engine.devices
    return (
        max(moving, flops / (device.flops * device.shares.matmul)) + STEP_SECONDS.get(device.kind, 2e-3) / 4
    )


def accepted(tokens: int, acceptance: float) -> float:
    """Tokens that a step gives: (1 - a^(k + 1)) / (1 - a) (Leviathan et al. 2023, arXiv 2211.17192,
    equation 1)."""
    return float(sum(acceptance**k for k in range(tokens + 1)))


def speculate(
    model: Qwen35Config,
    device: DeviceSpec,
    engine: EnginePlan,
    *,
    rows: float,
    length: float,
    tokens: int,
    acceptance: float = ACCEPTANCE,
) -> Speculation:
    """What drafting does at `rows` rows, and up to how many it pays (5 % or more)."""

    def speedup(at: float) -> float:
        plain = decode_step(model, device, engine, rows=at, length=length)
        drafted = decode_step(model, device, engine, rows=at, length=length, width=tokens + 1)
        drafted += tokens * draft_step(model, device, engine, rows=at)
        return accepted(tokens, acceptance) * plain / drafted

    pays = [at for at in (2**n for n in range(13)) if speedup(at) >= 1.05]
    return Speculation(
        tokens, acceptance, accepted(tokens, acceptance), speedup(max(1.0, rows)), max(pays, default=0)
    )


def rollout_time(
    model: Qwen35Config,
    device: DeviceSpec,
    engine: EnginePlan,
    *,
    engines: int,
    sequences: int,
    prompts: int,
    prompt_length: float,
    new_tokens: float,
    longest: int,
    draft_tokens: int,
) -> RolloutTime:
    """Sampling of one step.

    Args:
        model, device, engine: what runs where.
        engines: that share the sequences.
        sequences: sampled in all.
        prompts: different ones; a group's shared prompt is computed once.
        prompt_length: tokens of a prompt.
        new_tokens: tokens of a completion on average.
        longest: of the longest completion.
        draft_tokens: drafted a step; 0 is off.
    """
    own = -(-sequences // engines)
    rows = max(1, min(engine.rows, own))
    cost = sample_cost(model)
    prefill_flops = 2 * cost(round(prompt_length)) * -(-prompts // engines) / engine.devices
    prefill = prefill_flops / (device.flops * device.shares.matmul * 0.7)
    length = prompt_length + new_tokens / 2
    drafts = model.mtp_layers > 0
    asked = draft_tokens or 2
    talk = speculate(model, device, engine, rows=rows, length=length, tokens=asked) if drafts else None
    # Lengths differ, so that fewer and fewer rows are left: a step has the mean number of them.
    waves = own / rows
    steps = max(longest, longest * waves if waves > 1 else longest)
    mean_rows = own * new_tokens / steps
    step = decode_step(model, device, engine, rows=max(1.0, mean_rows), length=length)
    factor = talk.speedup if talk and draft_tokens else 1.0
    decode = steps * step / factor
    return RolloutTime(prefill, decode, step, sequences * new_tokens / (prefill + decode), talk)


def _share_of_weights(model: Qwen35Config, tokens: float) -> float:
    """Part of the weights that `tokens` tokens read: experts that none of them chose are not."""
    if not model.experts:
        return 1.0
    expert = 3 * model.hidden_size * model.ffn_size * model.experts * model.num_layers
    rest = (sample_cost(model).linear) - expert * model.experts_per_token / model.experts
    touched = 1 - (1 - model.experts_per_token / model.experts) ** tokens
    return float((rest + expert * touched) / (rest + expert))

"""Memory of one sampling engine on each of its devices: weights, recurrent states, keys and values, draft.

An engine of SGLang takes a share of the device, puts weights and states there and gives the rest to keys and
values. The embedded engine (transformers) lets them grow with the sequences.
"""

from dataclasses import dataclass
from math import ceil

from relax_core.model.config import Qwen35Config
from relax_core.plan.devices import GIB, DeviceSpec

_FLOAT = 4
_HALF = 2
GRAPHS = 2 * GIB
"""Recorded graphs, workspaces and the activations of a prefill of 8192 tokens (an assumption)."""
LEFT = 1 * GIB
"""What an engine that gave up its memory still holds: graphs and workspaces (an assumption)."""
DEFAULT_FRACTION = 0.8
STATES_PER_ROW = 4
"""Recurrent states that servers keep for a running sequence (`relax_rollout.engines.sglang.launch`)."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine, on each of its devices.

    Attributes:
        devices: of one engine.
        weights: bytes of the target's weights, all read for every token.
        tower: bytes of a vision tower, which only prompts with pictures read.
        draft: bytes of the draft layers' weights; embedding and head are the target's.
        states: bytes of recurrent and convolution states.
        cache: bytes of keys and values.
        other: graphs and workspaces.
        cached_tokens: tokens whose keys and values the cache holds.
        rows: sequences decoded together.
        state_bytes: of one sequence's states on a device.
        token_bytes: of one token's keys and values on a device.
    """

    devices: int
    weights: int
    tower: int
    draft: int
    states: int
    cache: int
    other: int
    cached_tokens: int
    rows: int
    state_bytes: int
    token_bytes: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "engine weights": self.weights,
            "engine tower": self.tower,
            "draft weights": self.draft,
            "states": self.states,
            "keys and values": self.cache,
            "engine, other": self.other,
        }

    @property
    def size(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def state_bytes(model: Qwen35Config, devices: int) -> int:
    """A sequence's states of all delta nets on one device: float32 matrices, and the last inputs of the
    convolutions in bfloat16."""
    layers = model.layer_types.count("linear_attention")
    heads = ceil(model.delta_value_heads / devices)
    matrices = heads * model.delta_key_dim * model.delta_value_dim * _FLOAT
    keys = ceil(model.delta_key_heads / devices) * model.delta_key_dim
    channels = 2 * keys + heads * model.delta_value_dim
    return layers * (matrices + channels * (model.conv_width - 1) * _HALF)


def token_bytes(model: Qwen35Config, devices: int, *, drafts: bool) -> int:
    """A token's keys and values on one device; a key/value head is on one device at least."""
    layers = model.layer_types.count("full_attention") + (model.mtp_layers if drafts else 0)
    return layers * 2 * ceil(model.kv_heads / devices) * model.head_dim * _HALF


def weight_bytes(model: Qwen35Config, devices: int) -> tuple[int, int, int]:
    """Bytes of the target's, the vision tower's and the draft layers' weights on one device, in bfloat16."""
    from relax_core.device.parallel import ParallelConfig
    from relax_core.plan.local import Local
    from relax_core.plan.parameters import DRAFTS, TOWER, Count, stage_parameters

    local = Local.of(model, ParallelConfig(), tokens=1, activation=_HALF)
    # A tower is spread like the rest, or whole on each device if the servers are told so.
    parts = stage_parameters(local, model.layer_types, first=True, last=True)
    draft, tower = (parts.pop(part, Count()).total for part in (DRAFTS, TOWER))
    target = sum(count.total for count in parts.values())
    spread = [ceil(numbers * _HALF / devices) for numbers in (target, tower, draft)]
    return spread[0], spread[1], spread[2]


def plan_engine(
    model: Qwen35Config,
    device: DeviceSpec,
    *,
    devices: int,
    rows: int,
    length: float,
    fraction: float | None,
    states: int | None,
    max_tokens: int | None,
    drafts: bool,
    embedded: bool,
) -> EnginePlan:
    """Plans one engine.

    Args:
        model: sizes.
        device: what it runs on.
        devices: of one engine.
        rows: sequences that it may decode together.
        length: tokens of a sequence when its keys and values are most, on average.
        fraction: share of the device for weights and caches; None takes the servers' usual one.
        states: recurrent states that are kept; None takes `STATES_PER_ROW` a row.
        max_tokens: tokens cached at most.
        drafts: whether the draft layers sample too.
        embedded: the engine in the trainer's process, whose caches grow with the sequences.
    """
    weights, tower, draft = weight_bytes(model, devices)
    draft = draft if drafts else 0
    each, token = state_bytes(model, devices), token_bytes(model, devices, drafts=drafts)
    if embedded:
        tokens = ceil(rows * length)
        logits = rows * model.vocab_size * _FLOAT
        return EnginePlan(
            devices, weights, tower, draft, rows * each, tokens * token, logits, tokens, rows, each, token
        )
    kept = (states or STATES_PER_ROW * rows) * each
    room = int((fraction or DEFAULT_FRACTION) * device.memory) - weights - tower - draft - kept
    tokens = max(0, room // token)
    tokens = min(tokens, max_tokens or tokens)
    running = min(rows, int(tokens // max(1.0, length)), states or rows)
    return EnginePlan(
        devices,
        weights,
        tower,
        draft,
        kept,
        tokens * token,
        int(GRAPHS),
        tokens,
        max(0, running),
        each,
        token,
    )

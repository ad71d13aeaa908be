"""Memory of one sampling engine on each of its devices: weights, recurrent states, keys and values, draft.

An engine of SGLang takes a share of the device, puts weights and states there and gives the rest to keys and
values, by the rules of its release 0.5.15 (`model_executor/model_runner_kv_cache_mixin.py`,
`mem_cache/memory_pool.py`), which `tests/plan/test_plan_against_sglang.py` compares with its own classes. The
embedded engine (transformers) lets them grow with the sequences.
"""

from dataclasses import dataclass
from math import ceil

from relax_core.config.rules.engines import STATES_WITH_PREFIXES
from relax_core.device.parallel import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.vision.config import VisionConfig
from relax_core.plan.devices import GIB, DeviceSpec
from relax_core.plan.local import Local
from relax_core.plan.parameters import DRAFTS, TOWER, Count, stage_parameters

_FLOAT = 4
_HALF = 2
GRAPHS = 2 * GIB
"""Recorded graphs, workspaces and the activations of a prefill of 8192 tokens (an assumption)."""
LEFT = GIB
"""What an engine that gave up its memory still holds: graphs and workspaces (an assumption)."""
MIB = 2**20
STATES_TO_TOKENS = 0.9
"""Memory of states over that of keys and values, where SGLang chooses the number of states."""


@dataclass(frozen=True)
class Servers:
    """How an engine of SGLang is started.

    Attributes:
        fraction: share of the device for weights and caches; None takes what the server would choose.
        states: recurrent states that are kept; None takes what the server would choose.
        max_tokens: tokens cached at most.
        prefill_tokens, largest_graph: what the chosen share of the device makes room for.
        prefixes: whether the prefix cache is on.
    """

    fraction: float | None = None
    states: int | None = None
    max_tokens: int | None = None
    prefill_tokens: int | None = None
    largest_graph: int | None = None
    prefixes: bool = True

    def share(self, device: DeviceSpec, devices: int, tower: VisionConfig | None) -> float:
        """Share of the device's free memory.

        On an NPU `relax_npu.engine` gives it, else SGLang leaves room for a prefill and graphs, 10 GiB at
        least, and more where the checkpoint has a tower (`ServerArgs._handle_gpu_memory_settings` and
        `adjust_mem_fraction_for_vlm`, which takes every tower for one of 24 layers).
        """
        if self.fraction is not None:
            return self.fraction
        if device.kind == "npu":
            return 0.6
        graph = self.largest_graph or (512 if devices >= 4 else 256)
        room = 512 + 1.5 * max(self.prefill_tokens or 8192, 2048) + 2 * graph + 128 * devices
        chosen = round(1 - max(room, 10 * 1024) * MIB / device.memory, 3)
        if tower is None:
            return chosen
        return chosen * 0.95 * min(1.05, max(0.8, 1.1 - 0.1 * (tower.hidden_size / 1024) ** 2))


@dataclass(frozen=True)
class EnginePlan:
    """One engine, on each of its devices.

    Attributes:
        devices: of one engine.
        weights: bytes of the target's weights, all read for every token.
        tower: bytes of a vision tower, which only prompts with pictures read.
        draft: bytes of the draft layers' weights; embedding and head are the target's.
        states: bytes of recurrent and convolution states, of drafted tokens too.
        cache: bytes of keys and values.
        other: graphs and workspaces.
        cached_tokens: tokens whose keys and values the cache holds.
        rows: sequences decoded together.
        state_bytes: of one sequence's states on a device.
        token_bytes: of one token's keys and values on a device.
        share: of the device that a server takes; None for the embedded engine.
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
    share: float | None = None

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


@dataclass(frozen=True)
class StateSize:
    """Bytes of one sequence's states of all delta nets on one device.

    Attributes:
        matrices: recurrent states; float32, but bfloat16 on an NPU, whose kernels read nothing else.
        column: one past input of all convolutions, in bfloat16.
        columns: past inputs that a convolution goes on from.
        npu: whether the pools are an NPU's.
    """

    matrices: int
    column: int
    columns: int
    npu: bool

    @classmethod
    def of(cls, model: Qwen35Config, devices: int, *, npu: bool = False) -> "StateSize":
        """Of a model on an engine of some devices."""
        layers = model.layer_types.count("linear_attention")
        heads = ceil(model.delta_value_heads / devices)
        keys = ceil(model.delta_key_heads / devices) * model.delta_key_dim
        numbers = heads * model.delta_key_dim * model.delta_value_dim
        channels = 2 * keys + heads * model.delta_value_dim
        return cls(
            layers * numbers * (_HALF if npu else _FLOAT),
            layers * channels * _HALF,
            model.conv_width - 1,
            npu,
        )

    @property
    def size(self) -> int:
        """As SGLang reckons with it (`mamba_cache_per_req`)."""
        return self.matrices + self.columns * self.column

    def pool(self, states: int, rows: int, drafted: int) -> int:
        """Bytes of a `MambaPool` of `states` states, one more for padding; with drafts also the states after
        each of `drafted` tokens of `rows` sequences, of which a GPU's share their past inputs."""
        kept = self.matrices + (self.columns + (max(0, drafted - 1) if self.npu else 0)) * self.column
        between = drafted * self.columns if self.npu else drafted + self.columns - 1
        passing = drafted * self.matrices + between * self.column
        return (states + 1) * kept + ((rows + 1) * passing if drafted else 0)


def token_bytes(model: Qwen35Config, devices: int, *, drafts: bool) -> int:
    """A token's keys and values on one device; a key/value head is on one device at least.

    Draft layers beyond the first have no cache of their own: SGLang starts one draft model of one layer.
    """
    layers = model.layer_types.count("full_attention") + (1 if drafts and model.mtp_layers else 0)
    return layers * 2 * ceil(model.kv_heads / devices) * model.head_dim * _HALF


def weight_bytes(model: Qwen35Config, devices: int) -> tuple[int, int, int]:
    """Bytes of the target's, the vision tower's and the draft layers' weights on one device, in bfloat16."""
    local = Local.of(model, ParallelConfig(), tokens=1, activation=_HALF)
    # A tower is spread like the rest, or whole on each device if the servers are told so.
    parts = stage_parameters(local, model.layer_types, first=True, last=True)
    draft, tower = (parts.pop(part, Count()).total for part in (DRAFTS, TOWER))
    target = sum(count.total for count in parts.values())
    spread = [ceil(numbers * _HALF / devices) for numbers in (target, tower, draft)]
    # Where devices outnumber key/value heads each has a whole one, and not its share.
    own = ceil(model.kv_heads / devices) - model.kv_heads / devices
    again = round(2 * own * model.head_dim * model.hidden_size) * _HALF
    spread[0] += model.layer_types.count("full_attention") * again
    spread[2] += model.mtp_layers * again
    return spread[0], spread[1], spread[2]


def plan_embedded(model: Qwen35Config, *, rows: int, length: float) -> EnginePlan:
    """The engine in the trainer's process, whose caches grow with the sequences.

    Args:
        model: sizes.
        rows: sequences decoded together.
        length: tokens of a sequence when its keys and values are most.
    """
    weights, tower, _draft = weight_bytes(model, 1)
    each, token = StateSize.of(model, 1).size, token_bytes(model, 1, drafts=False)
    tokens, logits = ceil(rows * length), rows * model.vocab_size * _FLOAT
    return EnginePlan(1, weights, tower, 0, rows * each, tokens * token, logits, tokens, rows, each, token)


def plan_servers(
    model: Qwen35Config,
    device: DeviceSpec,
    servers: Servers,
    *,
    devices: int,
    rows: int,
    most_rows: int,
    length: float,
    draft_tokens: int,
    taken: int = 0,
) -> EnginePlan:
    """One engine of SGLang.

    Args:
        model: sizes, with the tower that its checkpoint has.
        device: what it runs on.
        servers: how it is started.
        devices: of one engine.
        rows: sequences that it is given at once.
        most_rows: those that it may decode together.
        length: tokens of a sequence when its keys and values are most, on average.
        draft_tokens: drafted a step; 0 is off.
        taken: bytes of the device that others hold when it starts.
    """
    weights, tower, draft = weight_bytes(model, devices)
    draft = draft if draft_tokens else 0
    state = StateSize.of(model, devices, npu=device.kind == "npu")
    token = token_bytes(model, devices, drafts=draft_tokens > 0)
    share = servers.share(device, devices, model.vision)
    drafted = draft_tokens + 1 if draft_tokens else 0
    rest = share * (device.memory - taken) - weights - tower - draft
    each = STATES_WITH_PREFIXES if servers.prefixes else 1
    states = servers.states
    if states is None and (device.kind == "npu" or not servers.prefixes):
        states = most_rows
    if states is None:
        part = max(0.0, rest) * STATES_TO_TOKENS / (1 + STATES_TO_TOKENS)
        states = int(part // (state.size * (1 + drafted / each)))
    together = min(most_rows, states // each)
    rest -= state.size * (states + together * drafted)
    tokens = max(0, int(rest // token))
    tokens = min(tokens, servers.max_tokens or tokens)
    together = min(together, tokens // 2)
    return EnginePlan(
        devices,
        weights,
        tower,
        draft,
        state.pool(states, together, drafted),
        tokens * token,
        int(GRAPHS),
        tokens,
        max(0, min(rows, together, int(tokens // max(1.0, length)))),
        state.size,
        token,
        share,
    )

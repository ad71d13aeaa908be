"""Weights of one trainer rank by part, counted from the sizes of the model. Letters: see `local`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_core.model.lora_config import LoraConfig, Target
from relax_core.model.vision.config import VisionConfig
from relax_core.plan.local import Local


@dataclass(frozen=True)
class Count:
    """Weights.

    Attributes:
        dense: held by every expert-parallel rank, in the model's number format.
        expert: routed experts', spread over expert-parallel ranks.
        wide: in float32 whatever the model's format (the delta net's decay and norm).
    """

    dense: int = 0
    expert: int = 0
    wide: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.dense + other.dense, self.expert + other.expert, self.wide + other.wide)

    def __mul__(self, times: int) -> "Count":
        return Count(self.dense * times, self.expert * times, self.wide * times)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert + self.wide


TOWER, DRAFTS, ADAPTERS = "vision tower", "draft layers", "adapters"
"""Names of parts."""


def stage_parameters(
    local: Local,
    kinds: Sequence[str],
    *,
    first: bool,
    last: bool,
    lora: LoraConfig | None = None,
    critic: bool = False,
) -> dict[str, Count]:
    """Weights of a rank of one pipeline stage.

    Args:
        local: sizes.
        kinds: types of the stage's layers.
        first, last: whether the stage embeds tokens and sees pictures, and whether it has the head and the
            draft layers.
        lora: adapters of the trunk; None or rank 0 is none.
        critic: whether it is a critic's: one row is its head, and it has no draft layers.

    Returns:
        By part: vision tower, embedding, delta net, full attention, feed-forward or experts, norms, head,
        draft layers, adapters.
    """
    model = local.model
    hidden, drafts = model.hidden_size, model.mtp_layers if last and not critic else 0
    tied = model.tied and not critic
    matrix = local.vocab * hidden
    feed = "experts" if model.experts else "feed-forward"
    embeds = first or drafts > 0
    found = {
        TOWER: _tower(model.vision) if first and model.vision else Count(),
        # The last stage keeps a copy for its draft layers or its tied head.
        "embedding": Count(matrix if embeds or (last and tied) else 0),
        "delta net": _delta(local) * kinds.count("linear_attention"),
        "full attention": _attention(local) * kinds.count("full_attention"),
        feed: _feed_forward(local) * len(kinds),
        "norms": Count(2 * hidden * len(kinds) + (hidden if last else 0)),
        "head": Count((hidden if critic else matrix) if last and not tied else 0),
        DRAFTS: _draft(local) * drafts,
        ADAPTERS: _adapters(local, kinds, lora) if lora is not None and lora.rank else Count(),
    }
    return {part: count for part, count in found.items() if count.total}


def trained_parts(
    counts: Mapping[str, Count], *, drafts_only: bool = False, tower: bool = True
) -> dict[str, Count]:
    """Those of a stage's parts that take gradients.

    Args:
        counts: from `stage_parameters`; adapters, where there are any, are trained alone.
        drafts_only: whether the draft layers are.
        tower: whether the vision tower is trained.
    """
    if ADAPTERS in counts:
        return {ADAPTERS: counts[ADAPTERS]}
    if drafts_only:
        return {part: count for part, count in counts.items() if part == DRAFTS}
    return {part: count for part, count in counts.items() if tower or part != TOWER}


def _tower(vision: VisionConfig) -> Count:
    """Whole on every rank of the first stage; layer norms and projections have biases."""
    wide, ffn = vision.hidden_size, vision.ffn_size
    block = 4 * wide + (3 * wide + 3) * wide + (wide + 1) * wide + (wide + 1) * ffn + (ffn + 1) * wide
    joined = wide * vision.merge**2
    merger = 2 * wide + (joined + 1) * joined + (joined + 1) * vision.out_size
    patches = (vision.patch_features + 1) * wide
    return Count(patches + vision.side**2 * wide + vision.depth * block + merger)


def _adapters(local: Local, kinds: Sequence[str], lora: LoraConfig) -> Count:
    """Rank x (inputs + outputs) of every projection that is adapted: of these a rank holds its own share, and
    the other side whole (`relax_core.model.linear`)."""
    model, hidden = local.model, local.model.hidden_size
    keys, values = local.delta_heads
    width = values * model.delta_value_dim
    delta, full = kinds.count("linear_attention"), kinds.count("full_attention")
    feed = (model.shared_ffn_size if model.experts else model.ffn_size) // local.tensor
    routed = model.ffn_size // local.expert_ranks
    # Inputs and outputs of one, how many of them.
    sides: dict[Target, tuple[int, int]] = {
        "linear_qkv": (hidden + local.qkv_width, full),
        "linear_proj": (local.heads * model.head_dim + hidden, full),
        "in_proj": (hidden + 2 * keys * model.delta_key_dim + 2 * width + 2 * values, delta),
        "out_proj": (width + hidden, delta),
        "linear_fc1": (hidden + 2 * feed, len(kinds)),
        "linear_fc2": (feed + hidden, len(kinds)),
    }
    dense = sum(sides[target][0] * sides[target][1] for target in lora.targets if target in sides)
    expert = 0
    if "experts" in lora.targets:
        expert = local.local_experts * len(kinds) * (hidden + 2 * routed + routed + hidden)
    return Count(lora.rank * dense, expert=lora.rank * expert)


def _delta(local: Local) -> Count:
    model = local.model
    keys, values = local.delta_heads
    width = values * model.delta_value_dim
    conv = 2 * keys * model.delta_key_dim + width
    matrices = model.hidden_size * (conv + width + 2 * values) + width * model.hidden_size
    return Count(matrices + conv * model.conv_width, wide=2 * values + model.delta_value_dim)


def _attention(local: Local) -> Count:
    model = local.model
    projections = local.qkv_width + local.heads * model.head_dim
    return Count(model.hidden_size * projections + 2 * model.head_dim)


def _feed_forward(local: Local) -> Count:
    model, hidden = local.model, local.model.hidden_size
    if not model.experts:
        return Count(3 * hidden * model.ffn_size // local.tensor)
    routed = local.local_experts * 3 * hidden * model.ffn_size // local.expert_ranks
    shared = 3 * hidden * model.shared_ffn_size // local.tensor + hidden
    return Count(model.experts * hidden + shared, expert=routed)


def _draft(local: Local) -> Count:
    hidden = local.model.hidden_size
    own = 2 * hidden * hidden // local.tensor + 3 * hidden
    return Count(own + 2 * hidden) + _attention(local) + _feed_forward(local)

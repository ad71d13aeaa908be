"""Weights of one trainer rank by part, counted from the sizes of the model. Letters: see `local`."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def stage_parameters(local: Local, kinds: Sequence[str], *, first: bool, last: bool) -> dict[str, Count]:
    """Weights of a rank of one pipeline stage.

    Args:
        local: sizes.
        kinds: types of the stage's layers.
        first, last: whether the stage embeds tokens, and whether it has the head and the draft layers.

    Returns:
        By part: embedding, delta net, full attention, feed-forward or experts, norms, head, draft layers.
    """
    model = local.model
    hidden, drafts = model.hidden_size, model.mtp_layers if last else 0
    matrix = local.vocab * hidden
    feed = "experts" if model.experts else "feed-forward"
    embeds = first or drafts > 0
    found = {
        # The last stage keeps a copy for its draft layers or its tied head.
        "embedding": Count(matrix if embeds or (last and model.tied) else 0),
        "delta net": _delta(local) * kinds.count("linear_attention"),
        "full attention": _attention(local) * kinds.count("full_attention"),
        feed: _feed_forward(local) * len(kinds),
        "norms": Count(2 * hidden * len(kinds) + (hidden if last else 0)),
        "head": Count(matrix if last and not model.tied else 0),
        "draft layers": _draft(local) * drafts,
    }
    return {part: count for part, count in found.items() if count.total}


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

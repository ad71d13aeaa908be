"""What a sample costs, for balancing micro-batches and ranks."""

from relax_core.model.config import Qwen35Config
from relax_core.packing import SampleCost

_CHUNK = 64
"""Tokens that the delta net's chunked scan handles together."""


def sample_cost(model: Qwen35Config) -> SampleCost:
    """Multiplications of one forward pass over a sample, by its length.

    Projections, feed-forwards (the routed experts that a token visits), the delta net's scan and the head are
    linear; causal full attention is quadratic, L^2 / 2 pairs with two products each. The backward pass is
    twice the forward pass of either kind, so it changes no comparison.
    """
    hidden = model.hidden_size
    attention = model.attention_heads * model.head_dim
    kv = model.kv_heads * model.head_dim
    keys, values = (
        model.delta_key_heads * model.delta_key_dim,
        model.delta_value_heads * model.delta_value_dim,
    )
    feed_forward = 3 * hidden * model.ffn_size
    if model.experts:
        feed_forward *= model.experts_per_token
        feed_forward += hidden * (model.experts + 3 * model.shared_ffn_size)
    full = hidden * (3 * attention + 2 * kv)
    # States of [key, value] per head, read and written once a chunk, and products inside a chunk.
    scan = values * (3 * model.delta_key_dim + 2 * _CHUNK)
    delta = hidden * (2 * keys + 3 * values + 2 * model.delta_value_heads) + scan
    fulls = sum(kind == "full_attention" for kind in model.layer_types) + model.mtp_layers
    deltas = model.num_layers - fulls + model.mtp_layers
    draft = model.mtp_layers * (2 * hidden * hidden + hidden * model.vocab_size)
    linear = (
        fulls * full
        + deltas * delta
        + (model.num_layers + model.mtp_layers) * feed_forward
        + draft
        + hidden * model.vocab_size
    )
    return SampleCost(linear=float(linear), quadratic=float(fulls * attention))

"""The blocks tables are made of; a block is a function from sizes to rows.

Letters in comments: H hidden, F ffn, V vocabulary, E experts, P query heads per group, K/U key/value heads of
the delta net. Norm weights are stored alike on both sides (the trainer's modules take them as they are).
"""

from dataclasses import dataclass

from relax_bridge.partition import Component, GroupedSplit, Split
from relax_bridge.table import Place, Row
from relax_bridge.transforms import Concat, GroupedDeltaNet, GroupedQkv, Transform


def embedding(vocab: int, hidden: int, hf: str) -> Row:
    """The word embedding, cut over the vocabulary."""
    split = Split(0, (Component("vocab", vocab),), pad_multiple=1)
    return Place("", "").row("embedding.word_embeddings.weight", hf, (vocab, hidden), split)


def head(vocab: int, hidden: int, hf: str = "lm_head.weight") -> Row:
    """An untied output head, cut over the vocabulary."""
    split = Split(0, (Component("vocab", vocab),), pad_multiple=1)
    return Place("", "").row("output_layer.weight", hf, (vocab, hidden), split)


def norms(at: Place, hidden: int) -> list[Row]:
    """The two norms of a layer."""
    return [
        at.row("input_layernorm.weight", "input_layernorm.weight", (hidden,)),
        at.row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,)),
    ]


def attention(at: Place, hidden: int, heads: int, groups: int, dim: int, *, gate: bool) -> list[Row]:
    """Full attention; gated, q_proj holds [query; gate] per head and linear_qkv [q; gate; k; v] per group.

    Ranks hold whole groups, or with more ranks than groups a share of one (see `GroupedSplit`).
    """
    at = at.under("self_attention.", "self_attn.")
    q, kv = heads * dim, groups * dim
    q_rows = 2 * q if gate else q
    return [
        at.row(
            "linear_qkv.weight",
            ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
            ((q_rows, hidden), (kv, hidden), (kv, hidden)),
            GroupedSplit(groups, heads // groups, dim, 2 if gate else 1),
            GroupedQkv(groups, heads // groups, dim, gate),
        ),
        at.row("q_layernorm.weight", "q_norm.weight", (dim,)),
        at.row("k_layernorm.weight", "k_norm.weight", (dim,)),
        at.row("linear_proj.weight", "o_proj.weight", (hidden, q), Split(1, (Component("heads", q, dim),))),
    ]


@dataclass(frozen=True)
class DeltaNetSizes:
    """The sizes of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


def delta_net(at: Place, hidden: int, d: DeltaNetSizes, *, grouped: bool = False) -> list[Row]:
    """The gated delta net; in_proj has the rows q, k, v, z, b, a, conv1d the channels q, k, v.

    `grouped` is Qwen3-Next's checkpoint: in_proj_qkvz and in_proj_ba, interleaved by key head.
    """
    at = at.under("self_attention.", "linear_attn.")
    key, value, u = d.key_heads * d.key_dim, d.value_heads * d.value_dim, d.value_heads
    q, k = Component("q", key, d.key_dim), Component("k", key, d.key_dim)
    v, z = Component("v", value, d.value_dim), Component("z", value, d.value_dim)
    heads = Split(0, (Component("value heads", u),))
    if grouped:
        names: tuple[str, ...] = ("in_proj_qkvz.weight", "in_proj_ba.weight")
        rows: tuple[int, ...] = (2 * key + 2 * value, 2 * u)
        into: Transform = GroupedDeltaNet(d.key_heads, u // d.key_heads, d.key_dim, d.value_dim)
    else:
        names = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
        rows = (2 * key + value, value, u, u)
        into = Concat(rows)
    return [
        at.row(
            "in_proj.weight",
            names,
            tuple((r, hidden) for r in rows),
            Split(0, (q, k, v, z, Component("b", u), Component("a", u))),
            into,
        ),
        at.row("conv1d.weight", "conv1d.weight", (2 * key + value, 1, d.conv_width), Split(0, (q, k, v))),
        at.row("A_log", "A_log", (u,), heads),
        at.row("dt_bias", "dt_bias", (u,), heads),
        at.row("out_norm.weight", "norm.weight", (d.value_dim,)),
        at.row("out_proj.weight", "out_proj.weight", (hidden, value), Split(1, (v,))),
    ]


def swiglu(at: Place, hidden: int, ffn: int) -> list[Row]:
    """A dense SwiGLU MLP: linear_fc1 holds [gate; up]."""
    return [
        at.row(
            "linear_fc1.weight",
            ("gate_proj.weight", "up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            Split(0, (Component("gate", ffn), Component("up", ffn))),
            Concat((ffn, ffn)),
        ),
        at.row("linear_fc2.weight", "down_proj.weight", (hidden, ffn), Split(1, (Component("ffn", ffn),))),
    ]


def experts(at: Place, hidden: int, ffn: int, count: int, *, packed: bool) -> list[Row]:
    """Router and experts; packed is one tensor for all of them, [E, 2F, H] and [E, H, F]."""
    router = at.row("router.weight", "gate.weight", (count, hidden))
    fc1_split = Split(0, (Component("gate", ffn), Component("up", ffn)))
    fc2_split = Split(1, (Component("ffn", ffn),))
    fc1, fc2 = "experts.linear_fc1.weight{e}", "experts.linear_fc2.weight{e}"
    if packed:
        gate_up, down = (count, 2 * ffn, hidden), (count, hidden, ffn)
        return [
            router,
            at.row(fc1, "experts.gate_up_proj", gate_up, fc1_split, experts=count, stacked=True),
            at.row(fc2, "experts.down_proj", down, fc2_split, experts=count, stacked=True),
        ]
    one = "experts.{e}."
    return [
        router,
        at.row(
            fc1,
            (one + "gate_proj.weight", one + "up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
            fc1_split,
            Concat((ffn, ffn)),
            experts=count,
        ),
        at.row(fc2, one + "down_proj.weight", (hidden, ffn), fc2_split, experts=count),
    ]


def shared_expert(at: Place, hidden: int, ffn: int) -> list[Row]:
    """The expert every token visits, and its gate."""
    return [
        *swiglu(at.under("shared_experts.", "shared_expert."), hidden, ffn),
        at.row("shared_experts.gate_weight", "shared_expert_gate.weight", (1, hidden)),
    ]


def mtp_entrance(depth: int, hidden: int) -> list[Row]:
    """What surrounds the transformer layer of multi-token prediction: two norms, `fc`, a final norm.

    `fc` is [H, 2H] and takes [embedding; hidden] on both sides. Published checkpoints have one layer, under
    `mtp.`; a further layer k has its own tensors under `mtp.layers.{k}.`, since the trainer's layers share
    none.
    """
    rows: list[Row] = []
    places = (Place("mtp.layers.{i}.", "mtp.", (0,)), Place("mtp.layers.{i}.", "mtp.layers.{i}."))
    for place in places:
        layers = place.layers or tuple(range(1, depth))
        at = Place(place.megatron, place.hf, layers)
        if depth and layers:
            rows += [
                at.row("enorm.weight", "pre_fc_norm_embedding.weight", (hidden,)),
                at.row("hnorm.weight", "pre_fc_norm_hidden.weight", (hidden,)),
                at.row(
                    "eh_proj.weight",
                    "fc.weight",
                    (hidden, 2 * hidden),
                    Split(0, (Component("hidden", hidden),)),
                ),
                at.row("final_layernorm.weight", "norm.weight", (hidden,)),
            ]
    return rows


def mtp_layers(depth: int) -> Place:
    """The transformer layers of multi-token prediction."""
    return Place("mtp.layers.{i}.transformer_layer.", "mtp.layers.{i}.", tuple(range(depth)))

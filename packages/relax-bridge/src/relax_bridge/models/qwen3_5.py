"""Qwen3.5 dense: gated delta net and gated attention, text-only or the text part of a vision checkpoint.

Names follow the published checkpoints (transformers' `Qwen3_5ForCausalLM` plus `mtp.*`) and megatron-core.
Letters in comments: H hidden, F ffn, V vocabulary, K/U key/value heads of the delta net.
Norm weights are stored alike on both sides (the trainer's modules take them as they are).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_bridge.errors import ConfigError
from relax_bridge.model_map import ModelMap
from relax_bridge.models.reading import integers, layer_kinds
from relax_bridge.partition import Component, Split
from relax_bridge.table import Row, one
from relax_bridge.transforms import Concat, GroupedQkv

VISION = "model.visual."


@dataclass(frozen=True)
class Qwen35Dims:
    """The sizes of a text model that shape its tensors."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def key_rows(self) -> int:
        """Rows of q (and of k) of the delta net."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_rows(self) -> int:
        """Rows of v (and of z) of the delta net."""
        return self.linear_num_value_heads * self.linear_value_head_dim


def build(
    config: Mapping[str, Any], *, names: Iterable[str] | None = None, mtp_layers: int | None = None
) -> ModelMap:
    """The map of one Qwen3.5 dense model (see `relax_bridge.model_map` for the arguments)."""
    vision = "text_config" in config
    text = config["text_config"] if vision else config
    dims = Qwen35Dims(**integers(text, Qwen35Dims))
    kinds = layer_kinds(text, dims.num_hidden_layers)
    if text.get("attention_bias"):
        raise ConfigError("attention_bias: true has no row in the Qwen3.5 table; published models have none")
    if text.get("mtp_use_dedicated_embeddings"):
        raise ConfigError("mtp_use_dedicated_embeddings: true is not supported; MTP shares the embedding")
    prefix = "model.language_model." if vision else "model."
    if names is not None:
        names = tuple(names)
        vl_names = any(name.startswith("model.language_model.") for name in names)
        prefix = "model.language_model." if vl_names else "model."
    depth = int(text.get("mtp_num_hidden_layers") or 0) if mtp_layers is None else mtp_layers
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    linear = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    every = tuple(range(dims.num_hidden_layers))
    megatron, hf = "decoder.layers.{i}.", prefix + "layers.{i}."
    vocab = Split(0, (Component("vocab", dims.vocab_size),), pad_multiple=1)
    h = dims.hidden_size
    rows = [
        one("embedding.word_embeddings.weight", prefix + "embed_tokens.weight", (dims.vocab_size, h), vocab)
    ]
    rows += norm_rows(dims, megatron, hf, every)
    rows += delta_net_rows(dims, megatron, hf, linear)
    rows += attention_rows(dims, megatron, hf, full)
    rows += mlp_rows(dims, megatron, hf, every)
    rows.append(one("decoder.final_layernorm.weight", prefix + "norm.weight", (h,)))
    if not config.get("tie_word_embeddings", False):
        rows.append(one("output_layer.weight", "lm_head.weight", (dims.vocab_size, h), vocab))
    rows += mtp_rows(dims, depth)
    return ModelMap(
        model=str(config["model_type"]), rows=tuple(rows), passthrough=(VISION,), mtp_layers=depth
    )


def norm_rows(d: Qwen35Dims, megatron: str, hf: str, at: tuple[int, ...]) -> list[Row]:
    """The two norms of a layer."""
    return [
        one(megatron + "input_layernorm.weight", hf + "input_layernorm.weight", (d.hidden_size,), i=at),
        one(
            megatron + "pre_mlp_layernorm.weight",
            hf + "post_attention_layernorm.weight",
            (d.hidden_size,),
            i=at,
        ),
    ]


def attention_rows(d: Qwen35Dims, megatron: str, hf: str, at: tuple[int, ...]) -> list[Row]:
    """Gated full attention: q_proj holds [query; gate] per head, linear_qkv [q; gate; k; v] per group.

    linear_qkv is one component: a group's block is contiguous, so an even cut of the rows gives each rank
    whole groups (and megatron-core also cuts evenly when there are more ranks than groups).
    """
    a, m = hf + "self_attn.", megatron + "self_attention."
    groups, dim, h = d.num_key_value_heads, d.head_dim, d.hidden_size
    q_rows, kv_rows = d.num_attention_heads * dim, groups * dim
    qkv = GroupedQkv(groups, d.num_attention_heads // groups, dim, gate=True)
    return [
        Row(
            m + "linear_qkv.weight",
            (a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"),
            ((2 * q_rows, h), (kv_rows, h), (kv_rows, h)),
            qkv,
            Split(0, (Component("groups of q, gate, k, v", 2 * q_rows + 2 * kv_rows),)),
            {"i": at},
        ),
        one(m + "q_layernorm.weight", a + "q_norm.weight", (dim,), i=at),
        one(m + "k_layernorm.weight", a + "k_norm.weight", (dim,), i=at),
        one(
            m + "linear_proj.weight",
            a + "o_proj.weight",
            (h, q_rows),
            Split(1, (Component("heads", q_rows, dim),)),
            i=at,
        ),
    ]


def delta_net_rows(d: Qwen35Dims, megatron: str, hf: str, at: tuple[int, ...]) -> list[Row]:
    """The gated delta net: in_proj rows in the order q, k, v, z, b, a."""
    a, m = hf + "linear_attn.", megatron + "self_attention."
    h, u = d.hidden_size, d.linear_num_value_heads
    key, value = d.key_rows, d.value_rows
    q, k = (Component(name, key, d.linear_key_head_dim) for name in "qk")
    v, z = (Component(name, value, d.linear_value_head_dim) for name in "vz")
    heads = Split(0, (Component("value heads", u),))
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    rows = (2 * key + value, value, u, u)
    return [
        Row(
            m + "in_proj.weight",
            tuple(f"{a}{name}.weight" for name in names),
            tuple((r, h) for r in rows),
            Concat(rows),
            Split(0, (q, k, v, z, Component("b", u), Component("a", u))),
            {"i": at},
        ),
        one(
            m + "conv1d.weight",
            a + "conv1d.weight",
            (2 * key + value, 1, d.linear_conv_kernel_dim),
            Split(0, (q, k, v)),
            i=at,
        ),
        one(m + "A_log", a + "A_log", (u,), heads, i=at),
        one(m + "dt_bias", a + "dt_bias", (u,), heads, i=at),
        one(m + "out_norm.weight", a + "norm.weight", (d.linear_value_head_dim,), i=at),
        one(m + "out_proj.weight", a + "out_proj.weight", (h, value), Split(1, (v,)), i=at),
    ]


def mlp_rows(d: Qwen35Dims, megatron: str, hf: str, at: tuple[int, ...]) -> list[Row]:
    """SwiGLU: linear_fc1 holds [gate; up]."""
    f, h = d.intermediate_size, d.hidden_size
    return [
        Row(
            megatron + "mlp.linear_fc1.weight",
            (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"),
            ((f, h), (f, h)),
            Concat((f, f)),
            Split(0, (Component("gate", f), Component("up", f))),
            {"i": at},
        ),
        one(
            megatron + "mlp.linear_fc2.weight",
            hf + "mlp.down_proj.weight",
            (h, f),
            Split(1, (Component("ffn", f),)),
            i=at,
        ),
    ]


def mtp_rows(d: Qwen35Dims, depth: int) -> list[Row]:
    """Multi-token prediction: `mtp.fc` and its norms of the first layer keep the published names.

    Published checkpoints have one layer. A further layer k has its own projection and norms under
    `mtp.layers.{k}.`, since the trainer's layers share none.
    """
    rows: list[Row] = []
    h = d.hidden_size
    for hf, at in (("mtp.", (0,)), ("mtp.layers.{i}.", tuple(range(1, depth)))):
        if depth and at:
            m = "mtp.layers.{i}."
            out = Split(0, (Component("hidden", h),))
            rows += [
                one(m + "enorm.weight", hf + "pre_fc_norm_embedding.weight", (h,), i=at),
                one(m + "hnorm.weight", hf + "pre_fc_norm_hidden.weight", (h,), i=at),
                one(m + "eh_proj.weight", hf + "fc.weight", (h, 2 * h), out, i=at),
                one(m + "final_layernorm.weight", hf + "norm.weight", (h,), i=at),
            ]
    if depth:
        every, megatron, hf = tuple(range(depth)), "mtp.layers.{i}.transformer_layer.", "mtp.layers.{i}."
        rows += norm_rows(d, megatron, hf, every)
        rows += attention_rows(d, megatron, hf, every)
        rows += mlp_rows(d, megatron, hf, every)
    return rows

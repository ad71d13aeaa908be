"""Qwen3 dense and MoE, and Qwen3-Next: the tables beside Qwen3.5's.

Qwen3 has plain (ungated) attention in every layer and no delta net; Qwen3-Next is Qwen3.5 MoE with other
projections in the delta net, one tensor an expert, and layers that may be dense.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_bridge.errors import ConfigError
from relax_bridge.model_map import ModelMap
from relax_bridge.models import blocks
from relax_bridge.models.reading import Source, layer_kinds, positions
from relax_bridge.table import Place, Row


def build(
    config: Mapping[str, Any], *, names: Iterable[str] | None = None, mtp_layers: int | None = None
) -> ModelMap:
    """The map of a `qwen3` or `qwen3_moe` model (see `relax_bridge.model_map` for the arguments)."""
    source = Source.of(config, names, mtp_layers)
    if source.mtp_layers:
        raise ConfigError(f"{source.kind} has no multi-token prediction; got {source.mtp_layers} MTP layers")
    hidden, layers = source.sizes("hidden_size", "num_hidden_layers")
    every = _place(source, tuple(range(layers)))
    middle = [*blocks.norms(every, hidden), *_attention(source, every, gate=False)]
    middle += _mlp(source, layers, moe=source.kind == "qwen3_moe", shared=False)
    return _whole(source, middle)


def build_next(
    config: Mapping[str, Any], *, names: Iterable[str] | None = None, mtp_layers: int | None = None
) -> ModelMap:
    """The map of a `qwen3_next` model (see `relax_bridge.model_map` for the arguments)."""
    source = Source.of(config, names, mtp_layers)
    hidden, layers = source.sizes("hidden_size", "num_hidden_layers")
    delta = blocks.DeltaNetSizes(
        *source.sizes(
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )
    )
    source.divides("linear_num_value_heads", "linear_num_key_heads")
    kinds = layer_kinds(source.text, layers)
    middle = blocks.norms(_place(source, tuple(range(layers))), hidden)
    linear, full = positions(kinds, "linear_attention"), positions(kinds, "full_attention")
    middle += blocks.delta_net(_place(source, linear), hidden, delta, grouped=True)
    middle += _attention(source, _place(source, full), gate=True)
    middle += _mlp(source, layers, moe=True, shared=True)
    tail: list[Row] = []
    if source.mtp_layers:
        inner = blocks.mtp_layers(source.mtp_layers)
        tail += [*blocks.mtp_entrance(source.mtp_layers, hidden), *blocks.norms(inner, hidden)]
        tail += [*_attention(source, inner, gate=True), *_experts(source, inner, shared=True)]
    return _whole(source, middle, tail)


def _place(source: Source, layers: tuple[int, ...]) -> Place:
    return Place("decoder.layers.{i}.", source.prefix + "layers.{i}.", layers)


def _whole(source: Source, middle: list[Row], tail: list[Row] | None = None) -> ModelMap:
    vocab, hidden = source.sizes("vocab_size", "hidden_size")
    rows = [blocks.embedding(vocab, hidden, source.prefix + "embed_tokens.weight"), *middle]
    rows.append(Place("decoder.", source.prefix).row("final_layernorm.weight", "norm.weight", (hidden,)))
    if not source.tied:
        rows.append(blocks.head(vocab, hidden))
    rows += tail or []
    return ModelMap(source.kind, tuple(rows), mtp_layers=source.mtp_layers if tail else 0)


def _attention(source: Source, at: Place, *, gate: bool) -> list[Row]:
    hidden, heads, groups = source.sizes("hidden_size", "num_attention_heads", "num_key_value_heads")
    source.divides("num_attention_heads", "num_key_value_heads")
    # transformers' rule for a qwen3_moe config that leaves the head dim out.
    implied = source.kind == "qwen3_moe" and source.text.get("head_dim") is None
    dim = hidden // heads if implied else source.sizes("head_dim")[0]
    return blocks.attention(at, hidden, heads, groups, dim, gate=gate)


def _mlp(source: Source, layers: int, *, moe: bool, shared: bool) -> list[Row]:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    hidden = source.text["hidden_size"]
    (step,) = source.sizes("decoder_sparse_step") if "decoder_sparse_step" in source.text else (1,)
    dense_only = source.text.get("mlp_only_layers") or []
    if not isinstance(dense_only, Sequence) or any(type(i) is not int for i in dense_only):
        raise ConfigError(f"mlp_only_layers must be a list of layer numbers; got {dense_only!r}")
    sparse = tuple(i for i in range(layers) if moe and i not in dense_only and (i + 1) % step == 0)
    dense = tuple(i for i in range(layers) if i not in sparse)
    rows: list[Row] = []
    if dense:
        (ffn,) = source.sizes("intermediate_size")
        rows += blocks.swiglu(_place(source, dense).under("mlp.", "mlp."), hidden, ffn)
    if sparse:
        rows += _experts(source, _place(source, sparse), shared=shared)
    return rows


def _experts(source: Source, at: Place, *, shared: bool) -> list[Row]:
    hidden, ffn, count = source.sizes("hidden_size", "moe_intermediate_size", "num_experts")
    at = at.under("mlp.", "mlp.")
    packed = source.has("experts.gate_up_proj", at.hf.partition("layers.")[0]) or False
    rows = blocks.experts(at, hidden, ffn, count, packed=packed)
    if shared:
        rows += blocks.shared_expert(at, hidden, *source.sizes("shared_expert_intermediate_size"))
    return rows

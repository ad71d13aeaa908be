"""Qwen3.5 (and 3.6): gated delta net and gated attention, dense or MoE, with multi-token prediction.

Text-only checkpoints (`model.`) or the text part of vision-language ones (`model.language_model.`). Names:
transformers' `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM` and their vision classes, and the published
`mtp.*`; megatron-core's on the other side.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from relax_bridge.model_map import ModelMap
from relax_bridge.models import blocks
from relax_bridge.models.reading import Source, layer_kinds, positions
from relax_bridge.models.vision import VISION, tower_of
from relax_bridge.table import Place, Row


def build(
    config: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    mtp_layers: int | None = None,
    vision: bool = False,
) -> ModelMap:
    """The map of one Qwen3.5 dense model (see `relax_bridge.model_map` for the arguments)."""
    return _build(Source.of(config, names, mtp_layers), moe=False, tower=tower_of(config) if vision else ())


def build_moe(
    config: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    mtp_layers: int | None = None,
    vision: bool = False,
) -> ModelMap:
    """The map of one Qwen3.5 MoE model (see `relax_bridge.model_map` for the arguments)."""
    return _build(Source.of(config, names, mtp_layers), moe=True, tower=tower_of(config) if vision else ())


def _build(source: Source, *, moe: bool, tower: Sequence[Row]) -> ModelMap:
    vocab, hidden, layers, heads, groups, dim = source.sizes(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    delta = blocks.DeltaNetSizes(
        *source.sizes(
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )
    )
    source.divides("num_attention_heads", "num_key_value_heads")
    source.divides("linear_num_value_heads", "linear_num_key_heads")
    kinds = layer_kinds(source.text, layers)
    attention = partial(blocks.attention, hidden=hidden, heads=heads, groups=groups, dim=dim, gate=True)
    mlp = partial(_experts, source) if moe else partial(_dense, source)

    def place(at: tuple[int, ...]) -> Place:
        return Place("decoder.layers.{i}.", source.prefix + "layers.{i}.", at)

    every = place(tuple(range(layers)))
    rows = [blocks.embedding(vocab, hidden, source.prefix + "embed_tokens.weight")]
    rows += blocks.norms(every, hidden)
    rows += blocks.delta_net(place(positions(kinds, "linear_attention")), hidden, delta)
    rows += attention(place(positions(kinds, "full_attention")))
    rows += mlp(every, hidden)
    rows.append(Place("decoder.", source.prefix).row("final_layernorm.weight", "norm.weight", (hidden,)))
    if not source.tied:
        rows.append(blocks.head(vocab, hidden))
    if source.mtp_layers:
        inner = blocks.mtp_layers(source.mtp_layers)
        rows += blocks.mtp_entrance(source.mtp_layers, hidden)
        rows += [*blocks.norms(inner, hidden), *attention(inner), *mlp(inner, hidden)]
    return ModelMap(source.kind, (*rows, *tower), () if tower else (VISION,), source.mtp_layers)


def _dense(source: Source, at: Place, hidden: int) -> list[Row]:
    (ffn,) = source.sizes("intermediate_size")
    return blocks.swiglu(at.under("mlp.", "mlp."), hidden, ffn)


def _experts(source: Source, at: Place, hidden: int) -> list[Row]:
    ffn, shared, count = source.sizes(
        "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts"
    )
    at = at.under("mlp.", "mlp.")
    in_mtp = at.hf.startswith("mtp.")
    # Without names: as Qwen3.5 is published, packed in the decoder and one by one in MTP.
    packed = source.has("experts.gate_up_proj", "mtp." if in_mtp else "model.")
    packed = not in_mtp if packed is None else packed
    return [
        *blocks.experts(at, hidden, ffn, count, packed=packed),
        *blocks.shared_expert(at, hidden, shared),
    ]

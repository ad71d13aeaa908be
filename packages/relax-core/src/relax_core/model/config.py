"""`Qwen35Config`: the facts of a Qwen3.5 text model, read from its Hugging Face `config.json`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from relax_core.model.vision.config import VisionConfig, problems_of

LayerType = Literal["linear_attention", "full_attention"]
_LAYER_TYPES = ("linear_attention", "full_attention")


class UnsupportedModelError(ValueError):
    """The checkpoint's config asks for something this trainer does not build; the text lists all of it."""


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes and constants of a Qwen3.5 text model, dense or with experts, with any number of MTP layers.

    Attributes:
        vocab_size: rows of the embedding and of the output head.
        hidden_size: features of the residual stream.
        ffn_size: features inside the SwiGLU feed-forward; with experts, inside each routed one.
        layer_types: "linear_attention" (gated delta net) or "full_attention", one per layer.
        attention_heads: query heads of full attention; kv_heads divides it.
        kv_heads: key/value heads of full attention.
        head_dim: features of one attention head.
        delta_key_heads: query/key heads of the delta net; divides delta_value_heads.
        delta_value_heads: value heads of the delta net.
        delta_key_dim: features of one key head of the delta net.
        delta_value_dim: features of one value head of the delta net.
        conv_width: taps of the causal convolution.
        norm_eps: epsilon of every RMS norm.
        rope_base: base of the rotary frequencies.
        rotary_dim: leading features of each head that are rotated.
        tied: whether the output head is the embedding.
        mtp_layers: multi-token-prediction layers (each a full-attention layer).
        init_std: standard deviation of random weights.
        experts: routed experts of every layer, MTP layers included; 0 is a dense model.
        experts_per_token: routed experts that each token visits, their weights normalised.
        shared_ffn_size: features inside the shared expert.
        vision: sizes of the vision tower; None is a text model.
        rope_sections: feature pairs that turn by a token's frame, row and column; None is a text model.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    layer_types: tuple[LayerType, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_width: int
    norm_eps: float
    rope_base: float
    rotary_dim: int
    tied: bool
    mtp_layers: int
    init_std: float = 0.02
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn_size: int = 0
    vision: VisionConfig | None = None
    rope_sections: tuple[int, int, int] | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the trunk, MTP layers not counted."""
        return len(self.layer_types)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, vision: bool = False) -> "Qwen35Config":
        """Reads the content of a `config.json` of model type `qwen3_5_text` or `qwen3_5_moe_text`.

        Of a model with vision (`qwen3_5`, `qwen3_5_moe`, as published) the text model is read, and with
        `vision` the tower as well.

        Raises:
            UnsupportedModelError: listing every setting that this trainer does not build (quantised
                weights, other rotary types, biases, dropout, ...) and what is allowed instead.
        """
        outer, config = config, text_part(config)
        problems = list(_unsupported(config))
        if vision:
            problems += _wrong_vision(outer, config)
        if problems:
            raise UnsupportedModelError(
                "this checkpoint's config.json cannot be trained here:\n  - " + "\n  - ".join(problems)
            )
        rope = _rope(config)
        moe = _is_moe(config)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            ffn_size=int(config["moe_intermediate_size" if moe else "intermediate_size"]),
            layer_types=cast("tuple[LayerType, ...]", tuple(_layer_types(config))),
            attention_heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=head_dim,
            delta_key_heads=int(config["linear_num_key_heads"]),
            delta_value_heads=int(config["linear_num_value_heads"]),
            delta_key_dim=int(config["linear_key_head_dim"]),
            delta_value_dim=int(config["linear_value_head_dim"]),
            conv_width=int(config["linear_conv_kernel_dim"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", 0.25))),
            tied=bool(config.get("tie_word_embeddings", False)),
            mtp_layers=int(config.get("mtp_num_hidden_layers", 0) or 0),
            init_std=float(config.get("initializer_range", 0.02)),
            experts=int(config["num_experts"]) if moe else 0,
            experts_per_token=int(config["num_experts_per_tok"]) if moe else 0,
            shared_ffn_size=int(config["shared_expert_intermediate_size"]) if moe else 0,
            vision=VisionConfig.read(outer["vision_config"]) if vision else None,
            rope_sections=_sections(config) if vision else None,
        )


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_REQUIRED_OF_DENSE = ("intermediate_size",)
_REQUIRED_OF_MOE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
# Settings with one supported value: (key, value when absent, supported value).
_FIXED: tuple[tuple[str, Any, Any], ...] = (
    ("hidden_act", "silu", "silu"),
    ("attention_bias", False, False),
    ("attention_dropout", 0.0, 0.0),
    ("attn_output_gate", True, True),
    ("mtp_use_dedicated_embeddings", False, False),
)


def _unsupported(config: Mapping[str, Any]) -> Sequence[str]:
    """One sentence per setting that cannot be built."""
    found: list[str] = []
    kind = config.get("model_type")
    if kind not in _MODEL_TYPES:
        found.append(f"model_type is {kind!r}: only {' and '.join(map(repr, _MODEL_TYPES))} are supported")
    moe = _is_moe(config)
    if not moe and config.get("num_experts"):
        found.append(f"num_experts is set: models with experts are of type {_MODEL_TYPES[1]!r}, not {kind!r}")
    if config.get("quantization_config"):
        found.append(
            "quantization_config is set: only float weights are supported; dequantise the checkpoint"
        )
    for key, absent, supported in _FIXED:
        if config.get(key, absent) != supported:
            found.append(f"{key} is {config.get(key, absent)!r}: only {supported!r} is supported")
    required = (*_REQUIRED, *(_REQUIRED_OF_MOE if moe else _REQUIRED_OF_DENSE))
    missing = [key for key in required if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        found.append(f"{', '.join(missing)} must be positive integers, but are missing or are not")
    wrong = _wrong_types(config)
    found += wrong
    return (
        found
        if missing or wrong
        else [*found, *_wrong_shapes(config), *_wrong_rope(config), *_wrong_experts(config)]
    )


def _wrong_types(config: Mapping[str, Any]) -> Sequence[str]:
    """Optional settings that are there and are not what they must be."""
    found = [
        f"{name} is {given!r}: it must be {what}"
        for names, what, fits in _OPTIONAL
        for name in names
        if (given := config.get(name)) is not None and not fits(given)
    ]
    return found or [
        f"{name} is {given!r}: it must be a number above 0"
        for name in ("rope_theta", "partial_rotary_factor")
        if (given := _rope(config).get(name)) is not None and not _is_positive(given)
    ]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


_OPTIONAL: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (("rope_parameters", "rope_scaling"), "an object", lambda given: isinstance(given, Mapping)),
    (
        ("head_dim", "full_attention_interval"),
        "a positive integer",
        lambda given: isinstance(given, int) and given > 0,
    ),
    (
        ("mtp_num_hidden_layers",),
        "an integer of at least 0",
        lambda given: isinstance(given, int) and given >= 0,
    ),
    (("rms_norm_eps", "initializer_range"), "a number above 0", _is_positive),
    (
        ("layer_types",),
        "a list of names",
        lambda given: isinstance(given, list | tuple) and all(isinstance(name, str) for name in given),
    ),
)


def _wrong_shapes(config: Mapping[str, Any]) -> Sequence[str]:
    found = [
        f"{many} {config[many]} is not a multiple of {few} {config[few]}"
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        )
        if config[many] % config[few]
    ]
    types = _layer_types(config)
    if len(types) != config["num_hidden_layers"]:
        found.append(
            f"layer_types names {len(types)} layers, num_hidden_layers is {config['num_hidden_layers']}"
        )
    if unknown := sorted(set(types) - set(_LAYER_TYPES)):
        found.append(
            f"layer_types holds {', '.join(unknown)}: only {' and '.join(_LAYER_TYPES)} are supported"
        )
    return found


def _wrong_experts(config: Mapping[str, Any]) -> Sequence[str]:
    """Expert settings that do not fit together, or that Qwen3.5 does not have."""
    if not _is_moe(config):
        return []
    found = []
    if config["num_experts_per_tok"] > config["num_experts"]:
        found.append(
            f"num_experts_per_tok {config['num_experts_per_tok']} is above num_experts "
            f"{config['num_experts']}"
        )
    if not config.get("norm_topk_prob", True):
        found.append("norm_topk_prob is False: only True is supported")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        found.append(
            "mlp_only_layers or decoder_sparse_step leaves some layers dense: only experts in every layer "
            "are supported"
        )
    return found


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's settings; around it, a model with vision says whether the head is the embedding."""
    kind, text = config.get("model_type"), config.get("text_config")
    if f"{kind}_text" not in _MODEL_TYPES or not isinstance(text, Mapping):
        return config
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    outer = {key: config[key] for key in ("quantization_config",) if key in config}
    return {"model_type": f"{kind}_text", **text, **tied, **outer}


def _wrong_vision(outer: Mapping[str, Any], text: Mapping[str, Any]) -> Sequence[str]:
    """What keeps the tower from being built."""
    tower = outer.get("vision_config")
    if not isinstance(tower, Mapping):
        return ["there is no vision_config: this is a text model; set model.vision to absent"]
    found = list(problems_of(tower, text))
    if type(outer.get("image_token_id")) is not int:
        found.append("image_token_id is missing: it says which token stands for a piece of a picture")
    sections = _sections(text)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    pairs = int(head_dim * float(_rope(text).get("partial_rotary_factor", 0.25))) // 2
    if len(sections) != 3 or sum(sections) != pairs:
        found.append(
            f"rope_parameters.mrope_section is {list(sections)}: it must be three numbers whose sum is the "
            f"{pairs} rotated pairs of a head"
        )
    return found


def _sections(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Pairs of the multi-section rotary positions; those of transformers where a config names none."""
    return cast("tuple[int, int, int]", tuple(_rope(config).get("mrope_section") or (11, 11, 10)))


def _is_moe(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == _MODEL_TYPES[1]


def _wrong_rope(config: Mapping[str, Any]) -> Sequence[str]:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return [f"rope_type is {kind!r}: only 'default' is supported"]
    return []


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings, which older configs keep at top level."""
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    return {**outer, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """One name per layer; every fourth layer is full attention when the config does not say."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    interval = int(config.get("full_attention_interval", 4))
    return tuple(_LAYER_TYPES[(i + 1) % interval == 0] for i in range(config["num_hidden_layers"]))

"""Reads from a model config what a table needs, naming every problem at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_bridge.errors import ConfigError
from relax_bridge.model_map import mtp_layers_of

LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Source:
    """A model config, taken apart.

    Attributes:
        kind: the `model_type`.
        text: the config of the text model.
        prefix: what the text model's names start with, `model.` or `model.language_model.`.
        tied: whether the head is the embedding, from the *top-level* flag (the text config of a vision
            checkpoint inherits a default that is wrong for some sizes).
        mtp_layers: the number of multi-token-prediction layers.
        names: the checkpoint's tensor names, or None if unknown.
    """

    kind: str
    text: Mapping[str, Any]
    prefix: str
    tied: bool
    mtp_layers: int
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str] | None, mtp_layers: int | None) -> "Source":
        """Takes apart the arguments of `relax_bridge.model_map`.

        Raises:
            ConfigError: biases in attention, attention without its gate, a dedicated MTP embedding, a number
                of MTP layers that is none, or a value of another type than its key has.
        """
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ConfigError(f"text_config must be an object; got {nested!r}")
        tied = config.get("tie_word_embeddings", False)
        if tied not in (True, False, None):
            raise ConfigError(f"tie_word_embeddings must be true or false; got {tied!r}")
        text = dict(config if nested is None else nested)
        if "num_local_experts" in text:  # transformers' word since 5.0 for qwen3_moe
            text.setdefault("num_experts", text["num_local_experts"])
        if text.get("attention_bias"):
            raise ConfigError("attention_bias: true has no row in the tables; published models have none")
        if not text.get("attn_output_gate", True):
            raise ConfigError(
                "attn_output_gate: false has no row in the tables; published models have the gate"
            )
        if text.get("mtp_use_dedicated_embeddings"):
            raise ConfigError("mtp_use_dedicated_embeddings: true is not supported: MTP shares the embedding")
        held = None if names is None else tuple(names)
        inner = nested is not None
        if held:
            inner = any(name.startswith("model.language_model.") for name in held)
        depth = mtp_layers
        if depth is None:
            said = text.get("mtp_num_hidden_layers")
            depth = mtp_layers_of(held or ()) if said is None else said
        if type(depth) is not int or depth < 0:
            raise ConfigError(f"the number of MTP layers must be a whole number, 0 or more; got {depth!r}")
        return cls(
            str(config["model_type"]),
            text,
            "model.language_model." if inner else "model.",
            bool(tied),
            depth,
            held,
        )

    def sizes(self, *keys: str) -> list[int]:
        """The values of config keys that must be positive integers.

        Raises:
            ConfigError: names every key that is absent or something else.
        """
        bad = [f"{k} = {self.text.get(k)!r}" for k in keys if not _positive(self.text.get(k))]
        if bad:
            raise ConfigError("the model config needs positive integers; got " + ", ".join(bad))
        return [self.text[key] for key in keys]

    def divides(self, whole: str, part: str) -> None:
        """Raises `ConfigError` unless config value `part` divides config value `whole`."""
        if self.text[whole] % self.text[part]:
            raise ConfigError(f"{whole} = {self.text[whole]} is no multiple of {part} = {self.text[part]}")

    def has(self, ending: str, within: str = "") -> bool | None:
        """Whether a tensor name starts with `within` and ends so; None if the names are unknown."""
        if self.names is None:
            return None
        return any(name.startswith(within) and name.endswith(ending) for name in self.names)


def layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """One of `LAYER_KINDS` a layer, from `layer_types` or else `full_attention_interval`.

    Raises:
        ConfigError: neither key is there, a kind is unknown, or their number is not `layers`.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval")
        if not _positive(interval):
            raise ConfigError("the model config has neither layer_types nor full_attention_interval")
        return tuple(LAYER_KINDS[(i + 1) % int(interval or 1) == 0] for i in range(layers))
    if not isinstance(kinds, Sequence):
        raise ConfigError(f"layer_types must be a list; got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in LAYER_KINDS})
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} kinds for num_hidden_layers = {layers}"
            + (f" and holds {unknown}; known are {list(LAYER_KINDS)}" if unknown else "")
        )
    return tuple(kinds)


def positions(kinds: Iterable[str], wanted: str) -> tuple[int, ...]:
    """The layers of a kind."""
    return tuple(i for i, kind in enumerate(kinds) if kind == wanted)


def _positive(value: object) -> bool:
    return type(value) is int and value > 0

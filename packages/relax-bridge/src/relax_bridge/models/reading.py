"""Reads the sizes a table needs from a model config, naming every problem at once."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from relax_bridge.errors import ConfigError

LAYER_KINDS = ("linear_attention", "full_attention")


def integers(config: Mapping[str, Any], dims: type) -> dict[str, int]:
    """The fields of dataclass `dims`, each a positive integer of `config`.

    Raises:
        ConfigError: names every key that is absent or not a positive integer.
    """
    bad = [
        f"{key} = {config.get(key)!r}"
        for key in (field.name for field in fields(dims))
        if type(config.get(key)) is not int or config[key] <= 0
    ]
    if bad:
        raise ConfigError("the model config needs positive integers; got " + ", ".join(bad))
    return {field.name: config[field.name] for field in fields(dims)}


def layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """One of `LAYER_KINDS` a layer, from `layer_types` or else `full_attention_interval`.

    Raises:
        ConfigError: neither key is there, a kind is unknown, or their number is not `layers`.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval")
        if type(interval) is not int or interval < 1:
            raise ConfigError("the model config has neither layer_types nor full_attention_interval")
        return tuple(LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers))
    unknown = sorted(set(kinds) - set(LAYER_KINDS))
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} kinds for num_hidden_layers = {layers}"
            + (f" and holds {unknown}; known are {list(LAYER_KINDS)}" if unknown else "")
        )
    return tuple(kinds)

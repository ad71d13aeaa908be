"""Finds the weight map of a model by its `model_type` among the installed tables."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any

from relax_bridge.errors import ConfigError
from relax_bridge.model_map import ModelMap

GROUP = "relax_bridge.models"


def model_map(
    config: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    mtp_layers: int | None = None,
    vision: bool = False,
) -> ModelMap:
    """The weight map of a model, by entry point group `relax_bridge.models`.

    Args:
        config: the parsed `config.json`.
        names: the checkpoint's tensor names, where known: they settle what the config leaves open (the
            prefix `model.` or `model.language_model.`).
        mtp_layers: the number of multi-token-prediction layers of the *model*; by default the config's.
        vision: whether the model holds the vision tower; without it a checkpoint's tower is left alone.

    Raises:
        ConfigError: no `model_type`, no table for it, or a config the table cannot describe.
    """
    kind = config.get("model_type")
    found = _installed()
    if not isinstance(kind, str) or kind not in found:
        known = ", ".join(sorted(found)) or "none (is relax-bridge installed?)"
        raise ConfigError(f"no weight map for model_type {kind!r}; installed: {known}")
    build: Callable[..., ModelMap] = found[kind].load()
    if not vision:
        return build(config, names=names, mtp_layers=mtp_layers)
    if "vision" not in signature(build).parameters:
        raise ConfigError(f"the weight map of {kind!r} has no vision tower")
    return build(config, names=names, mtp_layers=mtp_layers, vision=True)


@cache
def _installed() -> dict[str, EntryPoint]:
    """The installed tables by `model_type`; looked for once, as that takes milliseconds."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}

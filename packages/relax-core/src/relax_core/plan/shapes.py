"""The sizes of the model that a run trains: a checkpoint's own config where there is one, else a published
model's by its name."""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from relax_core.config.problems import nearest


class UnknownModelError(ValueError):
    """A model whose sizes cannot be found."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """`config.json` of the published models, by name; sizes only."""
    text = (files("relax_core.plan") / "shapes.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def model_facts(path: str) -> dict[str, Any]:
    """`config.json` of the checkpoint at `path`, or of the published model that its last part names.

    Args:
        path: as `model.path`: a directory, `builtin:...`, or a name such as `Qwen/Qwen3.5-9B`.

    Raises:
        UnknownModelError: there is neither.
    """
    from relax_core.assets import locate

    try:
        file = locate(path) / "config.json"
        if file.is_file():
            facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(facts, dict):
                raise ValueError(f"it holds a {type(facts).__name__}, not names and values")
            return facts
    except (ValueError, OSError, RecursionError) as error:
        raise UnknownModelError(f"{path}: its config.json cannot be read: {error}") from error
    name = Path(path).name
    if name in published():
        return published()[name]
    near = nearest(name, published())
    raise UnknownModelError(
        f"{path} holds no config.json and is none of the models whose sizes are known: "
        f"{', '.join(published())}{f'; did you mean {near}?' if near else ''}"
    )

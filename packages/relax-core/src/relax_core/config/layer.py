"""A layer of settings that knows where each came from, and how layers lie upon each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.config.problems import Problem
from relax_core.config.yaml_text import Path


@dataclass
class Layer:
    """Settings from one place.

    Attributes:
        values: nested mapping of sections and fields.
        origins: for a path, the words that tell the user where it was set.
        problems: what was wrong while reading.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: Path, value: Any, origin: str) -> None:
        """Sets one value, making the sections on its way."""
        inner = self.values
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
        self.origins[path] = origin

    def over(self, below: "Layer") -> "Layer":
        """This layer's settings over those of `below`.

        Mappings merge key by key, and a section without content sets nothing; every other value replaces the
        one below. Problems of both are kept.
        """
        return Layer(
            _merge(below.values, self.values),
            {**below.origins, **self.origins},
            [*below.problems, *self.problems],
        )


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and (value is None or isinstance(value, dict)):
            merged[key] = _merge(old, value or {})
        else:
            merged[key] = value
    return merged

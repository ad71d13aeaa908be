"""Engines by name, found through the entry-point group ``relax_rollout.engines``."""

from importlib.metadata import entry_points
from typing import Any

from relax_rollout.engine import RolloutEngine

ENGINE_GROUP = "relax_rollout.engines"


def available_engines() -> tuple[str, ...]:
    """Names of the engines installed, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENGINE_GROUP)}))


def create_engine(name: str, **options: Any) -> RolloutEngine:
    """Start the engine called ``name``.

    An entry point names a callable that takes the options as keywords and returns an engine; for the built-in
    ``transformers`` they are the fields of :class:`relax_rollout.engines.transformers.TransformersConfig`.

    Raises:
        ValueError: no such engine, or an option that it does not know.
    """
    points = {point.name: point for point in entry_points(group=ENGINE_GROUP)}
    if name not in points:
        raise ValueError(
            f"no engine is called {name!r}; installed are: {', '.join(sorted(points)) or 'none'}"
        )
    engine: RolloutEngine = points[name].load()(**options)
    return engine

"""The algorithms by name: those that ship with the package, and your own as `module:name`."""

import importlib

from relax_core.algorithms.algorithm import Algorithm
from relax_core.algorithms.builtin import BUILT_IN

_REGISTRY: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm) -> None:
    """Makes an algorithm known by its name.

    Raises:
        ValueError: another algorithm has the name.
    """
    if algorithm.name in _REGISTRY:
        raise ValueError(f"algorithm {algorithm.name!r} is registered already: choose another name")
    _REGISTRY[algorithm.name] = algorithm


def algorithm_names() -> tuple[str, ...]:
    """Names of all known algorithms, sorted."""
    return tuple(sorted(_REGISTRY))


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or the one that `module:name` says.

    Raises:
        ValueError: no algorithm has the name; the known ones are listed. Or the module cannot be imported.
    """
    if ":" in name:
        return _imported(name)
    if name not in _REGISTRY:
        raise ValueError(
            f"unknown algorithm {name!r}: allowed are {', '.join(algorithm_names())}, or your own as "
            "module:name"
        )
    return _REGISTRY[name]


def _imported(spec: str) -> Algorithm:
    module, _, attribute = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's module, which may raise anything
        what = (
            error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        )
        raise ValueError(
            f"algorithm {spec!r} cannot be imported: {what}. Give module:name, with the module on PYTHONPATH"
        ) from error
    if not isinstance(found, Algorithm):
        raise ValueError(
            f"algorithm {spec!r} is a {type(found).__name__}: it must be a relax_core.algorithms.Algorithm"
        )
    return found


for _algorithm in BUILT_IN:
    register_algorithm(_algorithm)

"""What a recipe says about the dies of a run; relax-core, which reads it, is looked up by name."""

from importlib import import_module
from typing import Any

_LOADER = "relax_core.config.load"


class RecipeError(ValueError):
    """The recipe cannot be read here, or is none for the NPU."""


def shares_dies(spec: str) -> bool:
    """Whether two processes use a die: a trainer rank, and an engine that takes turns with it.

    Args:
        spec: name of a recipe that relax-core has, or path of a YAML file.

    Raises:
        RecipeError: relax-core is not installed, refuses the recipe, or the recipe is for another device.
    """
    try:
        loader = import_module(_LOADER)
    except ModuleNotFoundError as error:
        if error.name not in (_LOADER, *(_LOADER.rsplit(".", n)[0] for n in (1, 2))):
            raise
        raise RecipeError(
            "a recipe is read by relax-core, which is not installed; give --colocate instead"
        ) from None
    try:
        config: Any = loader.load_config(spec)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if config.run.device not in ("auto", "npu"):
        raise RecipeError(f"{spec} is for {config.run.device}; set run.device to npu")
    apart = config.cluster.mode == "ray" or config.rollout.engine == "sglang"
    samples = config.algorithm.algorithm.loop == "rl"
    return bool(samples and apart and config.cluster.placement != "async")

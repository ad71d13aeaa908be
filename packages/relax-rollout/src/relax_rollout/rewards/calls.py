"""What a reward worker and its parent share: the set-up, finding a function, reading what it returned."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from relax_rollout.rewards.results import RewardResult


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs before the first call; the fields are those of Reward and RewardLimits."""

    path: tuple[str, ...]
    function: str
    concurrent: bool
    memory_gib: float | None
    timeout_s: float


LARGEST_SCORE = 1e30
"""Means and squares of larger scores would overflow."""


def resolve(spec: str) -> Callable[..., Any]:
    """Import ``module:function``.

    Raises:
        ValueError: the module cannot be imported, has no such attribute, or it cannot be called.
    """
    module_name, _, attribute = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the user's module, which may raise anything
        raise ValueError(f"reward {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(
            f"reward {spec!r} is {type(found).__name__}; it must be a function of one RewardInput"
        )
    return found  # type: ignore[no-any-return]


def as_result(value: object) -> RewardResult:
    """What a user's function returned, as a result.

    Raises:
        TypeError: neither a number, a bool nor a RewardResult.
        ValueError: a score that is not finite, or so large that means of it are not.
    """
    if isinstance(value, RewardResult):
        result = value
    elif isinstance(value, bool):
        result = RewardResult(score=float(value), correct=value)
    elif isinstance(value, Real):
        result = RewardResult(score=float(value))
    else:
        raise TypeError(
            f"the reward returned {type(value).__name__}; it must return a number or a RewardResult"
        )
    score: object = result.score
    if not isinstance(score, Real) or not abs(float(score)) <= LARGEST_SCORE:
        raise ValueError(
            f"the reward's score is {score!r}; it must be a finite number from {-LARGEST_SCORE:g} to "
            f"{LARGEST_SCORE:g}"
        )
    return result

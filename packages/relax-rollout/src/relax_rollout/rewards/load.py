"""Rewards by name."""

import inspect
from collections.abc import Callable
from typing import Any

from relax_rollout.rewards.calls import resolve
from relax_rollout.rewards.exact import EXACT_MATCH
from relax_rollout.rewards.math import MATH
from relax_rollout.rewards.results import Reward

BUILT_IN = {reward.name: reward for reward in (EXACT_MATCH, MATH)}


def load_reward(spec: str | Callable[..., Any]) -> Reward:
    """The reward called ``spec``.

    Args:
        spec: "math", "exact_match", or ``module:function`` (or that function itself): a function or coroutine
            function of one :class:`RewardInput` that returns a number, a bool or a :class:`RewardResult`. It
            runs in worker processes, which import the module anew; print goes to standard error there.

    Raises:
        ValueError: no such reward; a function that another process cannot import.
    """
    if not isinstance(spec, str):
        spec = _spec_of(spec)
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if spec.count(":") != 1 or not all(spec.split(":")):
        raise ValueError(
            f"no reward is called {spec!r}; give {', '.join(sorted(BUILT_IN))}, or your own as "
            "module:function"
        )
    function = resolve(spec)
    concurrent = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method of an object with an async __call__
    )
    return Reward(name=spec, quick=lambda item: None, worker=spec, concurrent=concurrent)


def _spec_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name or "<" in name:
        raise ValueError(
            f"the reward {function!r} cannot be imported by a worker process; put it at the top level of a "
            "module and give it as module:function"
        )
    return f"{module}:{name}"

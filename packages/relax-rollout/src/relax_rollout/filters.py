"""Which groups of completions are worth training on."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from relax_rollout.rewards.results import RewardResult


class GroupFilter(Protocol):
    """Decides on one group: the results of all completions of one prompt."""

    def __call__(self, results: Sequence[RewardResult], /) -> bool:
        """Whether to keep the group."""
        ...


def nonzero_spread(results: Sequence[RewardResult]) -> bool:
    """Keep a group whose scores differ: of equal scores every advantage is zero and nothing is learnt.

    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.2 (dynamic
    sampling).
    """
    return len({result.score for result in results}) > 1


def keep_all(results: Sequence[RewardResult]) -> bool:
    """Keep every group."""
    return True


BUILT_IN: dict[str, GroupFilter] = {"nonzero_spread": nonzero_spread, "none": keep_all}


def load_filter(spec: str) -> GroupFilter:
    """The filter called ``spec``: "nonzero_spread", "none" or ``module:function``.

    Raises:
        ValueError: no such filter.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(
            f"no filter is called {spec!r}; give {', '.join(BUILT_IN)}, or your own as module:function"
        )
    try:
        found: GroupFilter = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"filter {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found

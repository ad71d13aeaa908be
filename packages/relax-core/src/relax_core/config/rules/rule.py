"""What a rule is: one small function that objects to settings which cannot work, and says what would."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.config.problems import Problem

if TYPE_CHECKING:
    from relax_core.config.root import RelaxConfig
    from relax_core.model.config import Qwen35Config


@dataclass(frozen=True)
class Check:
    """A rule over some sections, in the order of the rule's arguments."""

    sections: tuple[str, ...]
    rule: Callable[..., Iterator[Problem]]

    @property
    def id(self) -> str:
        """The rule's name, such as `warmup-fits`."""
        return rule_id(self.rule)


@dataclass(frozen=True)
class ShapeRule:
    """A rule over the settings and the sizes of the checkpoint's model."""

    rule: "Callable[[RelaxConfig, Qwen35Config], Iterator[Problem]]"

    @property
    def id(self) -> str:
        """The rule's name."""
        return rule_id(self.rule)


def rule_id(rule: Callable[..., object]) -> str:
    """The name of a rule's function, with dashes."""
    return rule.__name__.strip("_").replace("_", "-")


def nearest_size(given: int, works: Callable[[int], bool], *, most: int = 1024) -> int | None:
    """The size nearest to `given` that works, the smaller of two; None if none does."""
    fitting = (size for size in range(1, most + 1) if works(size))
    return min(fitting, key=lambda size: (abs(size - given), size), default=None)


def words(sizes: Iterable[int], *, most: int = 12) -> str:
    """Sizes as text: `1, 2, 4 or 8`."""
    listed = [str(size) for size in list(sizes)[:most]]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"

"""What is wrong with a configuration: every problem with its path, value, allowed values and nearest name."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax_core.config.yaml_text import Path


@dataclass(frozen=True)
class Problem:
    """One thing to correct.

    Attributes:
        path: section names and field name; empty for the configuration as a whole.
        message: what is wrong.
        given: the value as the user wrote it, or None where nothing was given.
        origin: the file and line or the flag that gave it.
        allowed: the values or names that would be accepted.
        nearest: the most similar accepted value or name.
    """

    path: Path
    message: str
    given: str | None = None
    origin: str | None = None
    allowed: str | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        name = ".".join(self.path)
        head = f"{name} = {self.given}" if name and self.given is not None else name or self.given or ""
        head += f"   ({self.origin})" if self.origin and head else self.origin or ""
        lines = [f"  {head}"] if head else []
        lines.append(f"      {self.message}")
        if self.allowed:
            lines.append(f"      allowed: {self.allowed}")
        if self.nearest:
            lines.append(f"      did you mean {self.nearest}?")
        return "\n".join(lines)


class ConfigError(ValueError):
    """A configuration is refused; `problems` holds every reason."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = f"{count} problem{'s' * (count != 1)} in the configuration"
        super().__init__("\n\n".join([title, *map(str, self.problems)]))


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `name`, or None when none is similar.

    A dotted name is also compared by its last part: `lr` is near `trainer.lr`.
    """
    pool = list(dict.fromkeys(candidates))
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.6)
    if found:
        return found[0]
    tails = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(pool)}
    last = name.rsplit(".", 1)[-1].replace("-", "_")
    close = difflib.get_close_matches(last, tails, n=1, cutoff=0.75)
    return tails[close[0]] if close else None

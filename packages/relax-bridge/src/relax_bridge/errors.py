"""What the bridge refuses: every problem at once, by name, with what to do."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

_LISTED = 40


class BridgeError(ValueError):
    """The base of every refusal of this package."""


class ConfigError(BridgeError):
    """A model config the tables cannot describe."""


class CheckpointError(BridgeError):
    """A checkpoint directory that cannot be read or written."""


class MtpMismatchError(BridgeError):
    """A checkpoint whose number of multi-token-prediction layers is not the model's."""


@dataclass(frozen=True)
class Problems:
    """Names that break a one-to-one cover, by kind; every string starts with the tensor's name."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    mis_shaped: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def text(self) -> str:
        """One paragraph a kind, at most 40 names each (the attributes hold all of them)."""
        titles = {
            "missing": "missing",
            "extra": "not in the table",
            "mis_shaped": "of another shape",
            "unsupported": "of a dtype the trainer cannot hold (quantised?)",
        }
        parts = []
        for key, title in titles.items():
            names: Sequence[str] = getattr(self, key)
            if names:
                more = f"\n  ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
                parts.append(f"{len(names)} {title}:\n  " + "\n  ".join(names[:_LISTED]) + more)
        return "\n".join(parts)


class CoverageError(BridgeError):
    """Tensors that are missing, extra, mis-shaped or quantised; `problems` names every one."""

    def __init__(self, what: str, problems: Problems, hint: str = "") -> None:
        self.problems = problems
        super().__init__(f"{what}:\n{problems.text()}" + (f"\n{hint}" if hint else ""))

"""`Trajectory`: what followed a prompt, the model's tokens and those of its environment.

Axes: L tokens.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relax_rollout import DraftCounts
from relax_rollout.requests import FinishReason

NO_VERSION = -1
"""The version of a token that the model did not draw."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens behind a prompt, in order.

    Attributes:
        token_ids: of the model and of its environment.
        logprobs: of the model's tokens as the engine gave them; 0 for others.
        versions: of the weights that drew them; `NO_VERSION` for others.
        drawn: whether the model drew the token; only such tokens are learnt.
        finish_reason: of the model's last turn, or "abort" past a limit of time.
        turns: of the model.
        drafts: what speculative decoding did; None without it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    drawn: tuple[bool, ...]
    finish_reason: FinishReason
    turns: int = 1
    drafts: DraftCounts | None = None

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "Trajectory":
        """From what `state` gave."""
        drafts = state["drafts"]
        return cls(**{**state, "drafts": None if drafts is None else DraftCounts(**drafts)})

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`."""
        return asdict(self)

    @property
    def truncated(self) -> bool:
        """Whether the model was cut before it ended by itself."""
        return self.finish_reason != "stop"

    @property
    def drawn_versions(self) -> list[int]:
        """Versions of the model's tokens."""
        return [v for v, drawn in zip(self.versions, self.drawn, strict=True) if drawn]

    @property
    def drawn_count(self) -> int:
        """Tokens that the model drew."""
        return sum(self.drawn)

"""What a data set is made of once it is tokenised: prompts to answer, and samples to learn from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from relax_core.data.pictures import SamplePicture

Message = Mapping[str, Any]
"""One turn: `role`, `content`, and what else the chat template reads."""


class Example(Protocol):
    """What prompts and samples share."""

    @property
    def id(self) -> str:
        """Place of its row; unique in a data set."""
        ...

    @property
    def ids(self) -> NDArray[np.int32]:
        """[tokens] its token ids."""
        ...

    @property
    def prompt_text(self) -> str:
        """Text of the prompt: examples of equal prompts stay on one side of a split."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt to complete.

    Attributes:
        id: place of its row; unique in a data set.
        ids: [tokens] int32, what the engine is given.
        prompt_text: the text of these tokens, chat template included, and which pictures it has.
        messages: the conversation, or None where the prompt is plain text.
        answer: what a reward compares with, or None.
        metadata: further fields of the row, for a reward.
        pictures: in the order of their tokens.
    """

    id: str
    ids: NDArray[np.int32]
    prompt_text: str
    messages: tuple[Message, ...] | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple["SamplePicture", ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The token ids as plain numbers, as `relax_rollout.Request` takes them."""
        return tuple(self.ids.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A conversation, or a prompt with its completion, to learn from.

    Attributes:
        id: place of its row, with the turn behind it where a row gives several samples.
        ids: [tokens] int32.
        loss_mask: [tokens] bool; set where the token itself is to be learned (not the one before it).
        prompt_text: the text before the row's first token to learn, and which pictures the row has.
        pictures: in the order of their tokens.
    """

    id: str
    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    prompt_text: str
    pictures: tuple["SamplePicture", ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A better and a worse completion of one prompt."""

    chosen: Sample
    rejected: Sample

    @property
    def id(self) -> str:
        """Place of its row."""
        return self.chosen.id

    @property
    def ids(self) -> NDArray[np.int32]:
        """[tokens] of both, one after the other."""
        return np.concatenate([self.chosen.ids, self.rejected.ids])

    @property
    def prompt_text(self) -> str:
        """Text of the prompt."""
        return self.chosen.prompt_text

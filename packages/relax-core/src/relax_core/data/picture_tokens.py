"""`PictureTokens`: from the pictures of a conversation to the tokens that stand for them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_core.data.config import DataConfig
from relax_core.data.examples import Message
from relax_core.data.fields import images_of
from relax_core.data.parts import pictured
from relax_core.data.pictures import KeptPicture, PictureReader, SamplePicture
from relax_core.data.problems import RowError
from relax_core.data.rows import Row
from relax_core.data.tokenizer import Tokenizer, decode

Pieces = list[tuple[str, bool]]


class PictureTokens:
    """Reads the pictures of rows and places them.

    Args:
        cfg: names the row's pictures.
        tokenizer: of the model.
        reader: None where no row may have pictures.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, reader: PictureReader | None) -> None:
        self._cfg = cfg
        self._reader = reader
        self._token = "" if reader is None else decode(tokenizer, [reader.token_id])

    def read(self, row: Row, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[KeptPicture]]:
        """The messages with bare image parts, and the pictures in the order of these.

        Raises:
            RowError: there are pictures that are not to be read, or that cannot be.
        """
        if self._reader is None:
            if any(not isinstance(message["content"], str) for message in messages):
                raise RowError("the conversation has pictures: set data.images_key and model.vision")
            return messages, []
        messages, found = pictured(messages, images_of(row.fields, self._cfg), token=self._token)
        return messages, [self._reader.read(value, name, row.folder) for name, value in found]

    def expand(
        self, pieces: Pieces, pictures: Sequence[KeptPicture]
    ) -> tuple[Pieces, tuple[KeptPicture, ...]]:
        """Pieces in which every picture has as many tokens as stand for it, and the pictures they have.

        Raises:
            RowError: the pieces hold more pictures than there are, or one that is to be learned.
        """
        if not pictures:
            return pieces, ()
        expanded: Pieces = []
        used = 0
        for text, learned in pieces:
            head, *tails = text.split(self._token)
            if used + len(tails) > len(pictures) or (tails and learned):
                raise RowError("the chat template writes other pictures than the user's messages have")
            for tail in tails:
                head += self._token * pictures[used].tokens + tail
                used += 1
            expanded.append((head, learned))
        return expanded, tuple(pictures[:used])

    def place(
        self, ids: NDArray[np.int32], pictures: Sequence[KeptPicture], kept: slice
    ) -> tuple[SamplePicture, ...]:
        """Where the pictures of the `kept` tokens begin, counted from the first of these.

        Raises:
            RowError: the tokens are not those of the pictures, or one of these is cut.
        """
        if self._reader is None:
            return ()
        places = np.flatnonzero(ids == self._reader.token_id)
        if len(places) != sum(picture.tokens for picture in pictures):
            raise RowError("the tokenizer does not give one token for each piece of a picture")
        first, last, _ = kept.indices(len(ids))
        placed, at = [], 0
        for number, picture in enumerate(pictures, start=1):
            start, end = int(places[at]), int(places[at]) + picture.tokens
            at += picture.tokens
            if start < first < end or start < last < end:
                raise RowError(
                    f"data.max_tokens = {last - first} cuts picture {number}, whose {picture.tokens} tokens "
                    f"begin at {start}; raise it, or set data.overlong to skip"
                )
            if first <= start and end <= last:
                placed.append(SamplePicture(picture, start - first))
        return tuple(placed)


def with_keys(text: str, pictures: Sequence[KeptPicture]) -> str:
    """A prompt's text, and which pictures it has: prompts are equal if this is."""
    return "\n".join([text, *(picture.key for picture in pictures)])

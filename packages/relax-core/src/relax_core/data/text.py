"""From rows of bare text to samples of continued pre-training: documents cut into blocks, all of it learned.

Documents stand one behind the other with the end-of-text token between them, before the first and behind the
last. Blocks share one token, so that each token of that text is a target in exactly one block: the mean loss
over blocks is that of the text, and its exponential the perplexity.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relax_core.data.config import DataConfig
from relax_core.data.examples import Sample
from relax_core.data.length import LengthRule
from relax_core.data.problems import BadRow, DataError, RowError
from relax_core.data.rows import Row
from relax_core.data.store import ExampleFile, Examples
from relax_core.data.tokenizer import Tokenizer, encode

if TYPE_CHECKING:
    from relax_core.data.load import DataSet


@dataclass(frozen=True, slots=True)
class TextDraft:
    """A document before it is tokenised."""

    place: str
    text: str


class TextBuilder:
    """Turns rows into documents; `in_blocks` cuts them once it is known which are held out.

    Raises:
        DataError: there is no end-of-text token.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer) -> None:
        self._key = str(cfg.text_key)
        self._tokenizer = tokenizer
        self._end = _end_of_text(cfg, tokenizer)
        # A document of any length fits, as it is cut into blocks.
        self.length = LengthRule(None, "refuse")

    def draft(self, row: Row) -> list[TextDraft]:
        """The row's document.

        Raises:
            RowError: the row has none.
        """
        text = row.fields.get(self._key)
        if not isinstance(text, str) or not text:
            found = "empty" if text == "" else "missing" if text is None else f"a {type(text).__name__}"
            raise RowError(f"{self._key} is {found}: a document is text (data.text_key names its key)")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"{self._key} holds half a surrogate pair, which is no text") from error
        return [TextDraft(row.place, text)]

    def finish(self, drafts: Sequence[TextDraft]) -> Iterator[Sample | BadRow]:
        """Tokenises documents, with the end-of-text token before and behind each."""
        encoded = encode(self._tokenizer, [draft.text for draft in drafts])
        for draft, tokens in zip(drafts, encoded, strict=True):
            if not tokens:
                yield BadRow(draft.place, f"{self._key} gives no token")
                continue
            ids = np.asarray([self._end, *tokens, self._end], dtype=np.int32)
            yield Sample(draft.place, ids, _all_but_the_first(len(ids)), draft.text)


def in_blocks(data: "DataSet[Sample]", cfg: DataConfig) -> "DataSet[Sample]":
    """The same with blocks in the place of documents, of every source and of what is held out."""
    cut = blocks_of_joined if cfg.documents == "joined" else blocks_of_each
    file = ExampleFile[Sample]()

    def blocks(documents: Examples[Sample]) -> Examples[Sample]:
        return file.keep(cut(documents, cfg.block_tokens))

    held_out = blocks(data.held_out)
    if not data.mixture:
        return replace(data, train=blocks(data.train), held_out=held_out)
    mixture = tuple((blocks(documents), weight) for documents, weight in data.mixture)
    first, *others = (one for one, _ in mixture)
    return replace(data, train=first.followed_by(others), held_out=held_out, mixture=mixture)


def blocks_of_joined(documents: Iterable[Sample], tokens: int) -> Iterator[Sample]:
    """Blocks of one text made of all documents; what follows in a block sees what came before.

    Args:
        documents: as `TextBuilder` makes them, in order.
        tokens: of a block, at least 2; the last one may have fewer.

    Returns:
        Blocks; each is named by the document in which it begins, and how many tokens behind its beginning.
    """
    parts: list[NDArray[np.int32]] = []
    # Of the block in the making.
    name, length = "", 0
    for document in documents:
        # The end of a document is the beginning of the next.
        at = 0 if length == 0 else 1
        while at < len(document.ids):
            if length == 0:
                name = f"{document.id}+{at}"
            piece = document.ids[at : at + tokens - length]
            parts.append(piece)
            length += len(piece)
            at += len(piece)
            if length == tokens:
                yield _block(name, np.concatenate(parts))
                parts, length = [parts[-1][-1:]], 1
                name = f"{document.id}+{at - 1}"
    if length > 1:
        yield _block(name, np.concatenate(parts))


def blocks_of_each(documents: Iterable[Sample], tokens: int) -> Iterator[Sample]:
    """Blocks of one document each, which therefore see nothing of any other; arguments as above."""
    return (block for document in documents for block in blocks_of_joined([document], tokens))


def _block(name: str, ids: NDArray[np.int32]) -> Sample:
    return Sample(name, ids, _all_but_the_first(len(ids)), "")


def _all_but_the_first(count: int) -> NDArray[np.bool_]:
    return np.arange(count) > 0


def _end_of_text(cfg: DataConfig, tokenizer: Tokenizer) -> int:
    if cfg.end_of_text is not None:
        ids = encode(tokenizer, [cfg.end_of_text])[0]
        if len(ids) != 1:
            raise DataError(
                f"data.end_of_text {cfg.end_of_text!r} is {len(ids)} tokens: give the text of one special "
                "token, or null for the tokenizer's eos_token"
            )
        return int(ids[0])
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token (eos_token) to put between documents: name one in "
            "data.end_of_text"
        )
    return int(tokenizer.eos_token_id)

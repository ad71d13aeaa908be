"""From rows to samples of supervised fine-tuning, with masks of what is to be learned.

Pieces of text are tokenised one by one, cut where the assistant begins and ends to speak: the model then
learns exactly the tokens it would have to sample after the prompt's own, and no token straddles the border.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.data.chat import ChatRenderer
from relax_core.data.config import DataConfig
from relax_core.data.examples import Message, Sample
from relax_core.data.fields import completion_of, prompt_of, tools_of
from relax_core.data.length import LengthRule
from relax_core.data.parts import without_thoughts
from relax_core.data.picture_tokens import PictureTokens, Pieces, with_keys
from relax_core.data.pictures import KeptPicture, PictureReader
from relax_core.data.problems import BadRow, DataError, RowError
from relax_core.data.rows import Row
from relax_core.data.tokenizer import Tokenizer, decode, encode, special_texts
from relax_core.data.turns import Rendered, RewrittenHistoryError, assistant_turns, single_turns


@dataclass(frozen=True, slots=True)
class SampleDraft:
    """A sample before its text is tokenised.

    Attributes:
        place: of the row.
        turn: number behind the place where a row gives several samples, else None.
        pieces: (text, whether it is to be learned), the first not.
        prompt_text: the text before the row's first piece to learn, and which pictures the row has.
        pictures: those of the pieces, in order.
    """

    place: str
    turn: int | None
    pieces: Pieces
    prompt_text: str
    pictures: tuple[KeptPicture, ...] = ()


class SampleBuilder:
    """Turns rows into samples, by the settings, a tokenizer and what reads pictures.

    Raises:
        DataError: plain text is to be learned and the tokenizer has no end-of-text token.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, pictures: PictureReader | None = None) -> None:
        self._pictures = PictureTokens(cfg, tokenizer, pictures)
        if not cfg.chat:
            if tokenizer.eos_token_id is None:
                raise DataError(
                    "the tokenizer has no end-of-text token (eos_token) to put behind completions"
                )
            self._end = decode(tokenizer, [int(tokenizer.eos_token_id)])
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer.of(cfg, tokenizer) if cfg.chat else None
        self._ends = special_texts(tokenizer)
        self.length = LengthRule(cfg.max_tokens, cfg.overlong)

    def draft(self, row: Row) -> list[SampleDraft]:
        """The row's samples as pieces of text.

        Raises:
            RowError: the row has none.
        """
        prompt, completion = prompt_of(row.fields, self._cfg), completion_of(row.fields, self._cfg)
        if isinstance(prompt, str):
            completion = completion or ""
            if self._end in completion:
                raise RowError(
                    f"{self._cfg.completion_key} holds {self._end!r}, which is put behind it: a model would "
                    "learn to go on behind its end. Leave the token out"
                )
            return [SampleDraft(row.place, None, [(prompt, False), (completion, True)], prompt)]
        if completion is not None:
            if prompt[-1]["role"] == "assistant":
                raise RowError("the prompt ends with an assistant message and has a completion besides")
            prompt = (*prompt, {"role": "assistant", "content": completion})
        if self._cfg.thinking == "drop":
            prompt = without_thoughts(prompt)
        prompt, pictures = self._pictures.read(row, prompt)
        rendered = self._rendered(row, prompt)
        first = with_keys(rendered[0].text[: rendered[0].spans[0][0]], pictures)
        several = len(rendered) > 1
        drafts = []
        for turn, one in enumerate(rendered, start=1):
            pieces, used = self._pictures.expand(one.pieces(), pictures)
            drafts.append(SampleDraft(row.place, turn if several else None, pieces, first, used))
        return drafts

    def finish(self, drafts: Sequence[SampleDraft]) -> Iterator[Sample | BadRow]:
        """Tokenises drafts and checks them; those that do not fit are bad rows or left out."""
        encoded = self._encode(drafts)
        for draft, ids_of_pieces in zip(drafts, encoded, strict=True):
            try:
                self._check(draft, ids_of_pieces)
                sample = self._sample(draft, ids_of_pieces)
            except RowError as error:
                yield BadRow(draft.place, str(error))
                continue
            if sample is not None:
                yield sample

    def _rendered(self, row: Row, messages: tuple[Message, ...]) -> list[Rendered]:
        assert self._renderer is not None
        tools = tools_of(row.fields, self._cfg)
        try:
            return [assistant_turns(self._renderer, messages, tools, self._ends)]
        except RewrittenHistoryError:
            if self._cfg.rewritten_history == "refuse":
                raise
        return single_turns(self._renderer, messages, tools, self._ends)

    def _encode(self, drafts: Sequence[SampleDraft]) -> list[list[list[int]]]:
        plain = self._renderer is None
        heads = encode(self._tokenizer, [d.pieces[0][0] for d in drafts], add_special_tokens=plain)
        tails = iter(encode(self._tokenizer, [text for d in drafts for text, _ in d.pieces[1:]]))
        encoded = [
            [head, *(next(tails) for _ in d.pieces[1:])] for d, head in zip(drafts, heads, strict=True)
        ]
        if plain:
            for pieces in encoded:
                pieces[-1] = [*pieces[-1], int(self._tokenizer.eos_token_id or 0)]
        return encoded

    def _check(self, draft: SampleDraft, ids_of_pieces: list[list[int]]) -> None:
        if self._renderer is None:
            return
        for (text, learned), ids in zip(draft.pieces, ids_of_pieces, strict=True):
            if learned and not _same(decode(self._tokenizer, ids), text):
                given_back = decode(self._tokenizer, ids)
                raise RowError(f"the tokenizer gives back {given_back!r} where the assistant says {text!r}")
        whole = "".join(text for text, _ in draft.pieces)
        if not _same(decode(self._tokenizer, [i for ids in ids_of_pieces for i in ids]), whole):
            raise RowError("the tokenizer does not give back the conversation that it was given in pieces")

    def _sample(self, draft: SampleDraft, ids_of_pieces: list[list[int]]) -> Sample | None:
        ids = np.asarray([i for ids in ids_of_pieces for i in ids], dtype=np.int32)
        learned = [flag for (_, flag), ids in zip(draft.pieces, ids_of_pieces, strict=True) for _ in ids]
        kept = self.length.fit(len(ids), keep="start")
        if kept is None:
            return None
        mask = np.asarray(learned, dtype=np.bool_)[kept]
        if not mask.any():
            raise RowError("nothing to learn is left within data.max_tokens")
        name = draft.place if draft.turn is None else f"{draft.place}#{draft.turn}"
        return Sample(
            name, ids[kept], mask, draft.prompt_text, self._pictures.place(ids, draft.pictures, kept)
        )


def _same(one: str, other: str) -> bool:
    """Equal up to Unicode composition, which some tokenizers normalise."""
    return one == other or unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)

"""From rows to prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_core.data.chat import ChatRenderer
from relax_core.data.config import DataConfig
from relax_core.data.examples import Message, Prompt
from relax_core.data.fields import answer_of, metadata_of, prompt_of, tools_of
from relax_core.data.length import LengthRule
from relax_core.data.picture_tokens import PictureTokens, with_keys
from relax_core.data.pictures import KeptPicture, PictureReader
from relax_core.data.problems import BadRow, RowError
from relax_core.data.rows import Row
from relax_core.data.tokenizer import Tokenizer, encode


@dataclass(frozen=True, slots=True)
class PromptDraft:
    """A prompt before its text is tokenised; every picture of `text` has as many tokens as stand for it."""

    place: str
    prompt_text: str
    text: str
    messages: tuple[Message, ...] | None
    answer: str | None
    metadata: dict[str, Any]
    pictures: tuple[KeptPicture, ...] = ()


class PromptBuilder:
    """Turns rows into prompts, by the settings, a tokenizer and what reads pictures.

    `tools` are for rows that name none.
    """

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: Tokenizer,
        tools: Sequence[Any] = (),
        pictures: PictureReader | None = None,
    ) -> None:
        self._cfg = cfg
        self._pictures = PictureTokens(cfg, tokenizer, pictures)
        self._tools = list(tools) or None
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer.of(cfg, tokenizer) if cfg.chat else None
        self.length = LengthRule(cfg.max_tokens, cfg.overlong)

    def draft(self, row: Row) -> list[PromptDraft]:
        """The row's prompt as text.

        Raises:
            RowError: the row has none.
        """
        prompt = prompt_of(row.fields, self._cfg)
        answer, metadata = answer_of(row.fields, self._cfg), metadata_of(row.fields, self._cfg)
        if isinstance(prompt, str):
            return [PromptDraft(row.place, prompt, prompt, None, answer, metadata)]
        if prompt[-1]["role"] == "assistant":
            raise RowError("the prompt ends with an assistant message: the model has nothing to answer")
        assert self._renderer is not None
        tools = tools_of(row.fields, self._cfg) or self._tools
        prompt, pictures = self._pictures.read(row, prompt)
        text = self._renderer.render(prompt, tools, open_turn=True)
        prompt_text = with_keys(text, pictures)
        ((text, _),), used = self._pictures.expand([(text, False)], pictures)
        return [PromptDraft(row.place, prompt_text, text, prompt, answer, metadata, used)]

    def finish(self, drafts: Sequence[PromptDraft]) -> Iterator[Prompt | BadRow]:
        """Tokenises drafts; those that do not fit are bad rows or left out."""
        plain = self._renderer is None
        encoded = encode(self._tokenizer, [draft.text for draft in drafts], add_special_tokens=plain)
        for draft, ids in zip(drafts, encoded, strict=True):
            try:
                if not ids:
                    raise RowError("the prompt is empty")
                kept = self.length.fit(len(ids), keep="end")
                if kept is None:
                    continue
                whole = np.asarray(ids, dtype=np.int32)
                pictures = self._pictures.place(whole, draft.pictures, kept)
            except RowError as error:
                yield BadRow(draft.place, str(error))
                continue
            yield Prompt(
                draft.place,
                whole[kept],
                draft.prompt_text,
                draft.messages,
                draft.answer,
                draft.metadata,
                pictures,
            )

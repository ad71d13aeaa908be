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
from relax_core.data.problems import BadRow, RowError
from relax_core.data.rows import Row
from relax_core.data.tokenizer import Tokenizer, encode


@dataclass(frozen=True, slots=True)
class PromptDraft:
    """A prompt before its text is tokenised."""

    place: str
    text: str
    messages: tuple[Message, ...] | None
    answer: str | None
    metadata: dict[str, Any]


class PromptBuilder:
    """Turns rows into prompts, by the settings and a tokenizer; `tools` are for rows that name none."""

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, tools: Sequence[Any] = ()) -> None:
        self._cfg = cfg
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
            return [PromptDraft(row.place, prompt, None, answer, metadata)]
        if prompt[-1]["role"] == "assistant":
            raise RowError("the prompt ends with an assistant message: the model has nothing to answer")
        assert self._renderer is not None
        tools = tools_of(row.fields, self._cfg) or self._tools
        text = self._renderer.render(prompt, tools, open_turn=True)
        return [PromptDraft(row.place, text, prompt, answer, metadata)]

    def finish(self, drafts: Sequence[PromptDraft]) -> Iterator[Prompt | BadRow]:
        """Tokenises drafts; those that do not fit are bad rows or left out."""
        plain = self._renderer is None
        encoded = encode(self._tokenizer, [draft.text for draft in drafts], add_special_tokens=plain)
        for draft, ids in zip(drafts, encoded, strict=True):
            try:
                if not ids:
                    raise RowError("the prompt is empty")
                kept = self.length.fit(len(ids), keep="end")
            except RowError as error:
                yield BadRow(draft.place, str(error))
                continue
            if kept is not None:
                array = np.asarray(ids[kept], dtype=np.int32)
                yield Prompt(draft.place, array, draft.text, draft.messages, draft.answer, draft.metadata)

"""From rows to pairs of a better and a worse completion of one prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

from relax_core.data.config import DataConfig
from relax_core.data.examples import Pair
from relax_core.data.pictures import PictureReader
from relax_core.data.problems import BadRow, RowError
from relax_core.data.rows import Row
from relax_core.data.samples import SampleBuilder, SampleDraft
from relax_core.data.tokenizer import Tokenizer


class PairBuilder:
    """Turns rows of a prompt, a `chosen` and a `rejected` completion into pairs.

    A completion is text, or a list with one assistant message. Both are tokenised as supervised samples are.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer, pictures: PictureReader | None = None) -> None:
        self._cfg = cfg
        self._key = cfg.completion_key or "completion"
        self._samples = SampleBuilder(
            cfg.model_copy(update={"completion_key": self._key}), tokenizer, pictures
        )
        self.length = self._samples.length

    def draft(self, row: Row) -> list[tuple[SampleDraft, SampleDraft]]:
        """The row's two samples as pieces of text.

        Raises:
            RowError: one is missing, they are equal, or the prompt is no prompt.
        """
        texts = [self._completion(row, key) for key in (self._cfg.chosen_key, self._cfg.rejected_key)]
        if texts[0] == texts[1]:
            raise RowError(f"{self._cfg.chosen_key} and {self._cfg.rejected_key} are the same")
        pair = [
            draft
            for text in texts
            for draft in self._samples.draft(Row(row.place, {**row.fields, self._key: text}))
        ]
        if len(pair) != 2:
            raise RowError("the conversation gives several samples: set data.rewritten_history to refuse")
        return [(pair[0], pair[1])]

    def finish(self, drafts: Sequence[tuple[SampleDraft, SampleDraft]]) -> Iterator[Pair | BadRow]:
        """Tokenises drafts; a pair is bad, or left out, with either of its samples."""
        for draft in drafts:
            made = list(self._samples.finish(draft))
            bad = [one for one in made if isinstance(one, BadRow)]
            if bad:
                yield bad[0]
            elif len(made) == 2:
                chosen, rejected = (one for one in made if not isinstance(one, BadRow))
                yield Pair(chosen, rejected)

    def _completion(self, row: Row, key: str) -> str:
        value: Any = row.fields.get(key)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0].get("content") if value[0].get("role") == "assistant" else None
        if not isinstance(value, str):
            raise RowError(f"{key} must be text, or a list of one assistant message")
        return value

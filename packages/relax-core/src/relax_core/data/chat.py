"""Renders conversations through a chat template."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.data.config import DataConfig
from relax_core.data.examples import Message
from relax_core.data.problems import DataError, RowError
from relax_core.data.tokenizer import Tokenizer

Span = tuple[int, int]
"""Characters [start, end) of a rendered text."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRenderer:
    """The chat template of a tokenizer, or one in its place, with its arguments.

    Args:
        tokenizer: whose template and special tokens are used.
        template: Jinja text that takes the place of the tokenizer's template; None keeps it.
        args: arguments of the template.

    Raises:
        DataError: there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, args: Mapping[str, Any]) -> None:
        if template is None and not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template: set data.chat_template to a Jinja file, or data.chat to "
                "false if prompts need none"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._args = dict(args)

    @classmethod
    def of(cls, cfg: DataConfig, tokenizer: Tokenizer) -> "ChatRenderer":
        """The renderer that the settings ask for.

        Raises:
            DataError: there is no template, or its file cannot be read.
        """
        template = None if cfg.chat_template is None else _read(cfg.chat_template)
        return cls(tokenizer, template, cfg.template_args)

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, open_turn: bool) -> str:
        """The text of a conversation.

        Args:
            messages: at least one.
            tools: tool descriptions, or None.
            open_turn: ends with the opening of an assistant turn, for a model to go on.

        Raises:
            RowError: the template refuses the conversation.
        """
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=open_turn,
                tokenize=False,
                **self._args,
            )
        # A template is a program: what it does with unfit values fails with Python's own errors.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        return text

    def marked_spans(self, messages: Sequence[Message], tools: list[Any] | None) -> list[Span] | None:
        """What the template itself marks as the assistant's, by `{% generation %}`, in `render`'s text.

        Returns:
            Spans in order, or None if the template has no such marks.
        """
        template = self._tokenizer.get_chat_template(self._template, tools)
        if not _MARKER.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **{**self._tokenizer.special_tokens_map, **self._args},
        )
        return [(int(start), int(end)) for start, end in spans[0]]


def _read(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {file} cannot be read: {error}") from error

"""Finds in a rendered conversation exactly what the assistant has to say, end-of-turn token included.

What the model has to say in a turn is what follows the text it is given when sampling: the conversation so
far with the opening of an assistant turn. A turn's span is therefore the difference between two renderings,
one without and one with the turn. Marks of the template (`{% generation %}`) may leave out the start of a
span, for instance an empty thought, but must end where it ends.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.data.chat import ChatRenderer, Span
from relax_core.data.examples import Message
from relax_core.data.problems import RowError


class RewrittenHistoryError(RowError):
    """The template renders a turn differently once others follow."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text with what is to be learned of it.

    Attributes:
        text: up to the end of the last span.
        spans: in order, not touching one another's characters.
    """

    text: str
    spans: tuple[Span, ...]

    def pieces(self) -> list[tuple[str, bool]]:
        """The text cut at the spans: (piece, whether it is to be learned), first a piece that is not."""
        cuts: list[tuple[str, bool]] = []
        at = 0
        for start, end in self.spans:
            cuts += [(self.text[at:start], False), (self.text[start:end], True)]
            at = end
        return cuts


def assistant_turns(
    renderer: ChatRenderer, messages: Sequence[Message], tools: list[Any] | None, ends: frozenset[str]
) -> Rendered:
    """The conversation with the span of every assistant turn.

    Args:
        renderer: of the chat template.
        messages: the conversation.
        tools: tool descriptions, or None.
        ends: special tokens, one of which has to end a turn.

    Raises:
        RewrittenHistoryError: an earlier turn is rendered differently in the whole conversation.
        RowError: there is no assistant turn, one has no end token or holds one, or the template's marks do
            not fit.
    """
    turns = _assistant_positions(messages)
    whole = renderer.render(messages, tools, open_turn=False)
    spans = []
    for position in turns:
        after, span = _turn(renderer, messages[: position + 1], tools, ends)
        if not whole.startswith(after):
            raise RewrittenHistoryError(
                f"the chat template renders message {position} differently once others follow it; a model "
                "would learn turns that it never samples. Set data.rewritten_history to split, or "
                "data.chat_template to a template that leaves history alone"
            )
        spans.append(span)
    marks = renderer.marked_spans(messages, tools)
    if marks is not None:
        spans = _within(spans, marks, whole)
    return Rendered(whole[: spans[-1][1]], tuple(spans))


def single_turns(
    renderer: ChatRenderer, messages: Sequence[Message], tools: list[Any] | None, ends: frozenset[str]
) -> list[Rendered]:
    """One text for each assistant turn: the conversation up to it, with the span of that turn alone.

    Raises:
        RowError: as `assistant_turns`.
    """
    rendered = []
    for position in _assistant_positions(messages):
        upto = messages[: position + 1]
        text, span = _turn(renderer, upto, tools, ends)
        marks = renderer.marked_spans(upto, tools)
        if marks is not None:
            (span,) = _within([span], marks[-1:], text)
        rendered.append(Rendered(text[: span[1]], (span,)))
    return rendered


def _assistant_positions(messages: Sequence[Message]) -> list[int]:
    positions = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not positions:
        raise RowError("no assistant message to learn from")
    if positions[0] == 0:
        raise RowError("the conversation starts with the assistant: a user or system message must come first")
    return positions


def _turn(
    renderer: ChatRenderer, messages: Sequence[Message], tools: list[Any] | None, ends: frozenset[str]
) -> tuple[str, Span]:
    before = renderer.render(messages[:-1], tools, open_turn=True)
    after = renderer.render(messages, tools, open_turn=False)
    if not after.startswith(before):
        raise RewrittenHistoryError(
            f"message {len(messages) - 1} does not continue what the chat template gives the model to go on "
            "from; check data.template_args (for instance enable_thinking) and data.chat_template"
        )
    stripped = after.rstrip()
    if len(stripped) <= len(before) or not stripped.endswith(tuple(ends)):
        raise RowError(
            f"the chat template ends message {len(messages) - 1} with no special token, so that a model "
            "would not learn to stop; set data.chat_template to one that does"
        )
    end = next(end for end in ends if stripped.endswith(end))
    for number, message in enumerate(messages):
        if end in _said(message):
            raise RowError(
                f"message {number} holds {end!r}, which ends a turn: a model would learn to go on behind its "
                "end. Split the message in two, or leave the token out"
            )
    return after, (len(before), len(stripped))


def _said(message: Message) -> str:
    content = message["content"]
    parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    called = json.dumps(message.get("tool_calls") or "", ensure_ascii=False, default=str)
    return "".join([*parts, str(message.get("reasoning_content") or ""), called])


def _within(spans: list[Span], marks: list[Span], text: str) -> list[Span]:
    if len(marks) != len(spans):
        raise RowError(
            f"the chat template marks {len(marks)} assistant turns where there are {len(spans)}; correct its "
            "generation blocks"
        )
    narrowed = []
    for (start, end), (mark_start, mark_end) in zip(spans, marks, strict=True):
        marked = text[mark_start:mark_end].rstrip()
        if mark_start + len(marked) != end or not start <= mark_start < end:
            raise RowError(
                f"the chat template marks {marked!r} where the assistant says "
                f"{text[start:end]!r}; correct its generation blocks"
            )
        narrowed.append((mark_start, end))
    return narrowed

"""From a turn of the model to its next: the tokens of the replies between them.

The model's own tokens are never rendered or tokenised again. The chat template renders a conversation in
which a mark stands for the model's turn; what comes behind the mark is tokenised alone and appended.
"""

from collections.abc import Sequence

from relax_core.data.chat import ChatRenderer
from relax_core.data.examples import Message
from relax_core.data.tokenizer import Tokenizer, decode, encode, special_texts

_MARK = "relax-turn-of-the-model"


class Turns:
    """Tokens of replies, by the chat template of a run.

    Args:
        renderer: of the run's prompts.
        tokenizer: of the model.
        reply_tokens: at which the content of one reply is cut.
    """

    def __init__(self, renderer: ChatRenderer, tokenizer: Tokenizer, *, reply_tokens: int) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._reply_tokens = reply_tokens
        self._special = sorted(special_texts(tokenizer), key=len, reverse=True)

    def clean(self, message: Message) -> Message:
        """A reply as the model may see it: its content cut, and no special tokens in it."""
        content = str(message.get("content") or "")
        for text in self._special:
            # A space behind its first character keeps a tool from closing its turn and opening another.
            content = content.replace(text, f"{text[:1]} {text[1:]}")
        (ids,) = encode(self._tokenizer, [content])
        if len(ids) > self._reply_tokens:
            content = decode(self._tokenizer, ids[: self._reply_tokens])
        return {**message, "content": content}

    def between(self, replies: Sequence[Message], *, last: int | None) -> tuple[int, ...]:
        """Token ids from the end of a turn of the model to the beginning of its next.

        Args:
            replies: messages in between, at least one, from `clean`.
            last: the turn's last token; if it is the first of what follows, it is not repeated. None: the
                turn was cut, and what closes it is among the tokens given.
        """
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, *replies]
        text = self._renderer.render(conversation, None, open_turn=True)
        (ids,) = encode(self._tokenizer, [text[text.rindex(_MARK) + len(_MARK) :]])
        return tuple(ids[1:] if ids and ids[0] == last else ids)

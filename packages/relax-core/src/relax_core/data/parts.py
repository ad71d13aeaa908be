"""Messages made of parts, with pictures: which picture stands where in a conversation."""

import re
from collections.abc import Sequence
from typing import Any

from relax_core.data.examples import Message
from relax_core.data.problems import RowError

MARKER = "<image>"
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def pictured(
    messages: Sequence[Message], images: Sequence[Any], *, token: str
) -> tuple[tuple[Message, ...], list[tuple[str, Any]]]:
    """Messages whose pictures are bare `{"type": "image"}` parts, and the pictures in the order of these.

    A picture is a part of a message, with its own `image`, `path` or `url`, or without one and then the next
    of the row's `images`; or the marker `<image>` in a text, and then the next of them as well.

    Args:
        messages: the conversation.
        images: the row's own pictures.
        token: text of the token that stands for pictures, which no message may hold.

    Returns:
        (messages, pictures as (name, value))

    Raises:
        RowError: parts are malformed, or pictures and places for them are not as many.
    """
    left = list(images)
    found: list[tuple[str, Any]] = []
    rewritten = []
    wanted = 0
    for number, message in enumerate(messages):
        parts = _parts(message["content"], f"message {number}")
        content: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] == "text":
                if token in part["text"]:
                    raise RowError(f"message {number} holds {token!r}, which stands for pictures alone")
                content.append({"type": "text", "text": part["text"]})
                continue
            value = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
            if value is None:
                wanted += 1
                value = left.pop(0) if left else None
            found.append((f"picture {len(found) + 1}", value))
            content.append({"type": "image"})
        plain = all(part["type"] == "text" for part in content)
        text = "".join(part.get("text", "") for part in content)
        rewritten.append({**message, "content": text if plain else content})
    if left or any(value is None for _, value in found):
        raise RowError(
            f"the conversation has {wanted} places for pictures ({MARKER} or image parts), the row "
            f"{len(images)} pictures: they must be as many"
        )
    return tuple(rewritten), found


def without_thoughts(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same with what the assistant thought left out: `<think>...</think>` and `reasoning_content`."""
    kept = []
    for message in messages:
        said = dict(message)
        if message["role"] == "assistant":
            said.pop("reasoning_content", None)
            if isinstance(said["content"], str):
                said["content"] = _THOUGHT.sub("", said["content"], count=1)
        kept.append(said)
    return tuple(kept)


def check_parts(content: Any, name: str) -> Any:
    """The parts of a message; text alone is joined.

    Raises:
        RowError: a part is neither text nor a picture.
    """
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "image"):
            raise RowError(f"{name}.content[{number}] must be an object of type text or image")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise RowError(f"{name}.content[{number}] has no text")
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _parts(content: Any, name: str) -> list[dict[str, Any]]:
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(given, str) or not isinstance(given, list):
        raise RowError(f"{name} must be text or a list of parts")
    parts: list[dict[str, Any]] = []
    for part in given:
        pieces = part["text"].split(MARKER) if part["type"] == "text" else []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        parts += [part] if part["type"] == "image" else []
    return parts

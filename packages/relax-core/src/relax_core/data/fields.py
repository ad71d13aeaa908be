"""What the fields of a row mean: its conversation, completion, answer, tools and metadata."""

import json
import math
from collections.abc import Mapping
from typing import Any

from relax_core.data.config import DataConfig
from relax_core.data.examples import Message
from relax_core.data.parts import check_parts
from relax_core.data.problems import RowError

Fields = Mapping[str, Any]


def wanted_keys(cfg: DataConfig) -> frozenset[str]:
    """The keys that are read of a row."""
    if cfg.text_key is not None:
        return frozenset({cfg.text_key})
    named = (
        cfg.prompt_key,
        cfg.messages_key,
        cfg.completion_key,
        cfg.answer_key,
        cfg.tools_key,
        cfg.images_key,
    )
    return frozenset({key for key in named if key is not None} | set(cfg.metadata_keys))


def prompt_of(fields: Fields, cfg: DataConfig) -> str | tuple[Message, ...]:
    """The row's prompt: plain text, or a conversation with the system prompt in front.

    Raises:
        RowError: there is none, there are two, or it is malformed.
    """
    key, value = _the_one(fields, cfg)
    if isinstance(value, str):
        if key == cfg.messages_key and key != cfg.prompt_key:
            raise RowError(
                f"{key} must be a list of messages, not text (data.prompt_key names plain prompts)"
            )
        text = _text(value, key)
        if not cfg.chat:
            return text
        return _with_system(({"role": "user", "content": text},), cfg)
    if not cfg.chat:
        raise RowError(f"{key} is a conversation, which needs data.chat to be true")
    return _with_system(_messages(value, key), cfg)


def completion_of(fields: Fields, cfg: DataConfig) -> str | None:
    """The completion to learn, or None where the row is a whole conversation.

    Raises:
        RowError: the prompt has no completion, or a conversation has one too many.
    """
    key, _ = _the_one(fields, cfg)
    value = None if cfg.completion_key is None else fields.get(cfg.completion_key)
    if key == cfg.messages_key:
        return None
    if value is None:
        raise RowError(_missing(cfg.completion_key or "completion", fields, "data.completion_key"))
    if not isinstance(value, str):
        raise RowError(f"{cfg.completion_key} must be text, not {_kind(value)}")
    return _text(value, str(cfg.completion_key))


def answer_of(fields: Fields, cfg: DataConfig) -> str | None:
    """The answer as text; numbers are written as JSON writes them.

    Raises:
        RowError: the row has none although `data.answer_key` names one, or it is neither text nor number.
    """
    if cfg.answer_key is None:
        return None
    value = fields.get(cfg.answer_key)
    if value is None:
        raise RowError(_missing(cfg.answer_key, fields, "data.answer_key"))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{cfg.answer_key} must be text or a number, not {_kind(value)}")
    if isinstance(value, str):
        return _text(value, cfg.answer_key)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{cfg.answer_key} is {value}, which is no number")
    return json.dumps(value)


def tools_of(fields: Fields, cfg: DataConfig) -> list[Any] | None:
    """The tool descriptions, given as a list or as JSON text, or None.

    Raises:
        RowError: they are malformed.
    """
    value = None if cfg.tools_key is None else fields.get(cfg.tools_key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{cfg.tools_key} is no JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f"{cfg.tools_key} must be a list of objects")
    return [_without_null(tool) for tool in value]


def images_of(fields: Fields, cfg: DataConfig) -> list[Any]:
    """The row's own pictures, as `data.images_key` names them; a single one needs no list.

    Raises:
        RowError: they are no list.
    """
    value = None if cfg.images_key is None else fields.get(cfg.images_key)
    if value is None:
        return []
    if isinstance(value, str | bytes | dict):
        return [value]
    if not isinstance(value, list):
        raise RowError(f"{cfg.images_key} must be a list of pictures, not {_kind(value)}")
    return value


def metadata_of(fields: Fields, cfg: DataConfig) -> dict[str, Any]:
    """The fields that `data.metadata_keys` names.

    Raises:
        RowError: one is missing.
    """
    for key in cfg.metadata_keys:
        if key not in fields:
            raise RowError(_missing(key, fields, "data.metadata_keys"))
    return {key: fields[key] for key in cfg.metadata_keys}


def _the_one(fields: Fields, cfg: DataConfig) -> tuple[str, Any]:
    keys = dict.fromkeys(key for key in (cfg.prompt_key, cfg.messages_key) if key is not None)
    found = [key for key in keys if fields.get(key) is not None]
    if not found:
        raise RowError(_missing(" nor ".join(keys), fields, " or ".join(_settings(cfg))))
    if len(found) > 1:
        raise RowError(f"both {found[0]} and {found[1]} are there: set {' or '.join(_settings(cfg))} to null")
    return found[0], fields[found[0]]


def _settings(cfg: DataConfig) -> list[str]:
    return [f"data.{name}" for name in ("prompt_key", "messages_key") if getattr(cfg, name) is not None]


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{key} must be text or a list of messages, not {_kind(value)}")
    return tuple(_message(message, f"{key}[{number}]") for number, message in enumerate(value))


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{name} must be an object with role and content, not {_kind(value)}")
    message: dict[str, Any] = _of_sharegpt(_without_null(value), name)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RowError(f"{name} has no role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, list):
        content = check_parts(content, name)
        message = {**message, "content": content}
    elif not isinstance(content, str):
        raise RowError(f"{name}.content must be text, not {_kind(content)}")
    _text(json.dumps(message, ensure_ascii=False, default=repr), name)
    return message


_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def _of_sharegpt(message: dict[str, Any], name: str) -> dict[str, Any]:
    """A message written as {from, value}, as {role, content}."""
    if "role" in message or not isinstance(message.get("from"), str):
        return message
    speaker = message["from"]
    if speaker not in _SHAREGPT:
        raise RowError(f"{name}.from is {speaker!r}: it must be one of {', '.join(_SHAREGPT)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT[speaker], "content": message.get("value"), **rest}


def _with_system(messages: tuple[Message, ...], cfg: DataConfig) -> tuple[Message, ...]:
    if cfg.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": cfg.system_prompt}, *messages)


def _without_null(value: Any) -> Any:
    """Drops the null members that column stores add to objects of mixed shape."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} holds half a surrogate pair, which is no text") from error
    return value


def _missing(what: str, fields: Fields, setting: str) -> str:
    present = [key for key, value in fields.items() if value is not None]
    return f"no {what} (the row has {', '.join(present) or 'nothing'}); {setting} names the key"


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)

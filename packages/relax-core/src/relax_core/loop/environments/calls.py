"""Finds the tool calls in a turn of the model."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it.

    Attributes:
        name: of the tool; empty if it could not be read.
        arguments: by name; text where the model wrote XML, which has no other type.
        problem: why it cannot be read, else None.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


def tool_calls(turn: str) -> list[ToolCall]:
    """The calls between `<tool_call>` and `</tool_call>`, in order.

    Two forms are read: a JSON object with `name` and `arguments` (Hermes, Qwen3), and
    `<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder, Qwen3.5).
    """
    return [_call(body) for body in _CALL.findall(turn)]


def _call(body: str) -> ToolCall:
    written = _FUNCTION.fullmatch(body)
    if written is not None:
        return ToolCall(written[1], dict(_parameters(written[2])))
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        return ToolCall("", {}, f"the call is no JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "the call must be an object with a name and arguments")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, "arguments must be an object")
    return ToolCall(value["name"], arguments)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for found in _PARAMETER.finditer(text):
        yield found[1], found[2]

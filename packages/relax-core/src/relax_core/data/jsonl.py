"""Reads JSON Lines: one object a line, UTF-8."""

import json
from pathlib import Path
from typing import Any, NoReturn

from relax_core.data.problems import BadRow
from relax_core.data.rows import Row, Rows


def read_jsonl(file: Path, name: str) -> Rows:
    """The rows of a file; empty lines are passed over, a byte-order mark is allowed.

    Args:
        file: the file.
        name: how places name the file.
    """
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            place = f"{name}:{number}"
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode(), parse_constant=_refuse_constant)
            except UnicodeDecodeError as error:
                yield BadRow(place, f"not UTF-8 at byte {error.start}")
            except json.JSONDecodeError as error:
                yield BadRow(place, f"not JSON: {error.msg} at column {error.colno}")
            except ValueError as error:
                yield BadRow(place, f"not JSON: {error}")
            except RecursionError:
                yield BadRow(place, "nested too deeply to read")
            else:
                if isinstance(fields, dict):
                    yield Row(place, fields)
                else:
                    yield BadRow(place, f"a row must be an object, not {_kind(fields)}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")

"""Reads JSON Lines: one object a line, UTF-8."""

import json
from pathlib import Path
from typing import Any, NoReturn

from relax_core.data.problems import BadRow, DataError
from relax_core.data.rows import Row, Rows


def read_jsonl(file: Path, name: str) -> Rows:
    """The rows of a file; empty lines are passed over, a byte-order mark is allowed.

    Args:
        file: the file.
        name: how places name the file.

    Raises:
        DataError: the file cannot be read to its end.
    """
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    yield _row(f"{name}:{number}", line, file.parent)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


def _row(place: str, line: bytes, folder: Path) -> Row | BadRow:
    try:
        fields = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(place, f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return BadRow(place, f"not JSON: {error}")
    except RecursionError:
        return BadRow(place, "nested too deeply to read")
    if not isinstance(fields, dict):
        return BadRow(place, f"a row must be an object, not {_kind(fields)}")
    return Row(place, fields, folder)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")

"""Append-only JSON lines that a killed run leaves readable, and that a resumed run cuts to its checkpoint."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from relax_core.run.files import RunDirectoryError, to_json, write_atomic, writing
from relax_core.run.secrets import Masker


def read_jsonl(path: Path, *, allow_cut_end: bool = True) -> list[dict[str, Any]]:
    """Reads every line.

    Args:
        path: the file; a missing file has no lines.
        allow_cut_end: whether a last line without its end is dropped (a killed run wrote half of it).

    Raises:
        RunDirectoryError: a line is no JSON object; the file and line are named.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    cut = lines.pop()
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
    if cut and not allow_cut_end:
        raise RunDirectoryError(f"{path}, line {len(lines) + 1}: the line is cut")
    return records


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path}, line {number}: no JSON ({error})") from error
    if not isinstance(record, dict):
        raise RunDirectoryError(f"{path}, line {number}: no JSON object but {type(record).__name__}")
    return record


class JsonlWriter:
    """Appends one masked JSON object a line; each line is handed to the operating system at once."""

    def __init__(self, path: Path, mask: Masker, *, keep_to_step: int | None = None) -> None:
        """Opens the file.

        Args:
            path: the file, made if missing.
            mask: hides secrets.
            keep_to_step: drops lines whose `step` is later, and a cut last line, first; None refuses a file
                that has lines already.

        Raises:
            RunDirectoryError: the file has lines though none were expected, is damaged, or cannot be written.
        """
        self.path = path
        self._mask = mask
        if keep_to_step is not None:
            self._cut(keep_to_step)
        elif path.is_file() and path.stat().st_size:
            raise RunDirectoryError(f"{path} has lines already; resume the run or choose another --run.name")
        with writing(path):
            self._file: IO[bytes] = path.open("ab", buffering=0)

    def _cut(self, step: int) -> None:
        if not self.path.exists():
            return
        records = read_jsonl(self.path)
        whole = self.path.read_bytes().split(b"\n")[:-1]
        for number, record in enumerate(records, start=1):
            if not isinstance(record.get("step"), int):
                raise RunDirectoryError(f"{self.path}, line {number}: no step; restore the file")
        kept = [line for line, record in zip(whole, records, strict=True) if record["step"] <= step]
        write_atomic(self.path, b"".join(line + b"\n" for line in kept))

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line.

        Raises:
            RunDirectoryError: the disk is full or the file not writable; the line may be cut then, which
                reading and resuming allow for.
        """
        line = memoryview((to_json(self._mask.tree(record)) + "\n").encode())
        with writing(self.path):
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Makes all lines durable; raises like `write`."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

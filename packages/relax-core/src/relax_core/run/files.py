"""Writing that survives a crash at any moment, and errors that say what to do."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class RunDirectoryError(ValueError):
    """A run directory cannot be used: it is taken, finished, damaged, not writable, or its disk is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the errors of writing `path` into `RunDirectoryError` with the cure.

    Raises:
        RunDirectoryError: the disk is full, the place is not writable, or the path is of the wrong kind.
    """
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {_cure(error)}") from error


def _cure(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space, then go on with `relax-train --resume`"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}; choose a place that you may write to with --run.dir"
    if error.errno == errno.EFBIG:
        return (
            "the limit on file sizes (ulimit -f) is reached; raise it, then go on with `relax-train --resume`"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{error.strerror}: a file is in the way; choose another place with --run.dir or --run.name"
    return error.strerror or str(error)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces the file `path` by `data`: a reader, or a crash, sees the old bytes or the new, never a part.

    Raises:
        RunDirectoryError: see `writing`; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON in insertion order; numbers that JSON lacks become "NaN", "Infinity", "-Infinity"."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value

"""From what the user named to rows: files, folders, patterns, or the hub."""

import glob
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from relax_core.assets import locate
from relax_core.data.hub import read_hub
from relax_core.data.jsonl import read_jsonl
from relax_core.data.parquet import read_parquet
from relax_core.data.problems import DataError
from relax_core.data.rows import Rows

_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_rows(
    path: str, columns: Collection[str], *, subset: str | None, split: str, revision: str | None
) -> Rows:
    """The rows that `path` names, file after file in order of their names.

    Something that exists here is a file or folder; `*`, `?` and `[` make a pattern; anything else of the form
    `name` or `owner/name` is a data set of the hub.

    Args:
        path: as in `data.path`; `builtin:` names a file that ships with the package.
        columns: keys the caller reads (a column store reads no others).
        subset: see `read_hub`.
        split: see `read_hub`.
        revision: see `read_hub`.

    Raises:
        DataError: nothing of that name is there, or it is of no known kind.
    """
    files = find_files(path)
    if files is None:
        return read_hub(path, subset=subset, split=split, revision=revision)
    return _read_files(files, columns)


def find_files(path: str) -> list[tuple[str, Path]] | None:
    """The files that `path` names with the names that places show, or None if it can only be a hub name.

    Raises:
        DataError: see `read_rows`.
    """
    try:
        place = locate(path)
    except ValueError as error:
        raise DataError(str(error)) from error
    if place.is_file():
        return [(path, _known(path, place))]
    if place.is_dir():
        inside = sorted(file for file in place.iterdir() if file.suffix in _SUFFIXES)
        if not inside:
            raise DataError(f"the folder {path} holds no file that ends in {' or '.join(_SUFFIXES)}")
        return [(f"{path.rstrip('/')}/{file.name}", file) for file in inside]
    if any(letter in path for letter in "*?["):
        found = glob.glob(str(place), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        matches = sorted(match for match in found if Path(match).is_file())
        if not matches:
            raise DataError(f"no file matches the pattern {path}")
        return [(match, _known(match, Path(match))) for match in matches]
    if place.suffix in _SUFFIXES or not _HUB_NAME.fullmatch(path):
        raise DataError(f"there is no file or folder {path}: correct the setting that names it")
    return None


def refuse_shared_files(paths: Sequence[str]) -> None:
    """A file in two sources would be drawn by neither's weight, and its rows have one place twice.

    Raises:
        DataError: a file is in two of `paths`; and see `find_files`.
    """
    owners: dict[Path, str] = {}
    for path in paths:
        for name, file in find_files(path) or ():
            owner = owners.setdefault(file.resolve(), path)
            if owner != path:
                raise DataError(
                    f"{name} is in {owner} and in {path}: give each file to one of data.path and data.mixture"
                )


def _known(name: str, file: Path) -> Path:
    if file.suffix not in _SUFFIXES:
        raise DataError(
            f"{name}: a file of rows ends in {' or '.join(_SUFFIXES)}, not in {file.suffix or 'nothing'!r}"
        )
    return file


def _read_files(files: list[tuple[str, Path]], columns: Collection[str]) -> Rows:
    for name, file in files:
        yield from read_parquet(file, name, columns) if file.suffix == ".parquet" else read_jsonl(file, name)

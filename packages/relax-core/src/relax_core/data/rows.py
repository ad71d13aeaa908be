"""A row as it stands in its source, before it means anything."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.data.problems import BadRow


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        place: file and line; for Parquet and the hub, the row counted from 1. Unique in a data set.
        fields: the row's keys and values.
        folder: of its file, None where it is of no file.
    """

    place: str
    fields: Mapping[str, Any]
    folder: Path | None = field(default=None, compare=False)


Rows = Iterator[Row | BadRow]
"""Rows in the source's order; one that cannot be read is a `BadRow` in its place."""

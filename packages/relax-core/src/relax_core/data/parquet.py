"""Reads Parquet files, only the columns that are asked for."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from relax_core.data.problems import BadRow, DataError
from relax_core.data.rows import Row, Rows

# Few, as rows may hold pictures.
_BATCH_ROWS = 64


def read_parquet(file: Path, name: str, columns: Collection[str]) -> Rows:
    """The rows of a file, batch by batch.

    Args:
        file: the file.
        name: how places name the file.
        columns: the columns wanted; those that the file lacks are left out.

    Raises:
        DataError: the file is no Parquet, or has none of the columns.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            present = parquet.schema_arrow.names
            wanted = [column for column in present if column in columns]
            if not wanted:
                raise DataError(
                    f"{name}: none of the columns {', '.join(sorted(columns))} is there; it has "
                    f"{', '.join(present)}. Set data.prompt_key or data.messages_key"
                )
            number = 0
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                for fields in _fields(batch):
                    number += 1
                    place = f"{name}:{number}"
                    if isinstance(fields, UnicodeDecodeError):
                        yield BadRow(place, f"text that is not UTF-8: {fields}")
                    else:
                        yield Row(place, fields, file.parent)
    # What a damaged page raises is an OSError.
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} cannot be read as Parquet: {error}") from error


def _fields(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch one by one, as others may hold text that Parquet did not check."""
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield error

"""Reads a data set of the Hugging Face hub through the `datasets` library, where it is installed."""

from typing import Any

from relax_core.data.problems import DataError
from relax_core.data.rows import Row, Rows


def read_hub(name: str, *, subset: str | None, split: str, revision: str | None) -> Rows:
    """The rows of one split.

    Args:
        name: such as `openai/gsm8k`.
        subset: the data set's configuration; None takes its only one.
        split: such as `train`.
        revision: commit or tag; None takes the newest.

    Raises:
        DataError: the library is missing, or the data set cannot be had (no such name, no network).
    """
    load_dataset = _load_dataset(name)
    try:
        rows = load_dataset(name, subset, split=split, revision=revision)
    # datasets raises OSError (its network and not-found errors) and ValueError (unknown subset or split).
    except (OSError, ValueError) as error:
        raise DataError(
            f"the Hugging Face data set {name!r} (subset {subset}, split {split!r}) cannot be loaded: "
            f"{error}\nCheck the name, data.hub_subset and data.hub_split; without network, download it "
            "elsewhere and set data.path to its .jsonl or .parquet file"
        ) from error
    for number, fields in enumerate(rows, start=1):
        yield Row(f"{name}/{split}:{number}", fields)


def _load_dataset(name: str) -> Any:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise DataError(
            f"{name!r} is no file or folder here, so it names a Hugging Face data set; reading one needs the "
            "datasets library: pip install datasets, or set data.path to a .jsonl or .parquet file"
        ) from error
    return load_dataset

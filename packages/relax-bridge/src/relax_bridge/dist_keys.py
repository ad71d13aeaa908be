"""Under which keys Megatron's distributed checkpoints hold the tensors of a table.

A fused tensor is stored component by component (`<name>.<component>`), so that a checkpoint written on any
number of ranks reads on any other; the experts of a layer are one tensor with a leading axis. Layers are
counted through the whole model.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from relax_bridge.model_map import ModelMap
from relax_bridge.partition import Range, Split
from relax_bridge.table import Entry
from relax_bridge.transforms import Shape

# Tensors of a training checkpoint that are not weights.
STATE = ("optimizer.", "rng_state")
STATE_SUFFIXES = ("._extra_state",)


class StoredKey(NamedTuple):
    """A tensor of a distributed checkpoint.

    Attributes:
        key: its key.
        shape: its shape.
        entries: the table's tensors that it holds: one, or all experts of a layer along the first axis.
        rows: the rows of each that it holds.
        padded: whether more rows (of a padded vocabulary) may follow.
    """

    key: str
    shape: Shape
    entries: tuple[Entry, ...]
    rows: Range
    padded: bool


def stored_keys(table: ModelMap) -> Iterator[tuple[StoredKey, ...]]:
    """The keys of each tensor of a table (of all experts together), in its order."""
    for _, group in groupby(table.entries, key=lambda entry: (id(entry.row), entry.layer)):
        entries = tuple(group)
        row, layer = entries[0].row, entries[0].layer
        key = row.megatron.replace("{e}", "").format(i=layer)
        whole = row.megatron_shape
        components = row.partition.components if isinstance(row.partition, Split) else ()
        padded = isinstance(row.partition, Split) and row.partition.pad_multiple is not None
        parts = [(key, Range(0, whole[0]))]
        if len(components) > 1:
            ends = [sum(part.size for part in components[: i + 1]) for i in range(len(components))]
            parts = [
                (f"{key}.{part.name}", Range(end - part.size, part.size))
                for part, end in zip(components, ends, strict=True)
            ]
        lead = (len(entries),) if "e" in row.at else ()
        yield tuple(
            StoredKey(name, (*lead, rows.size, *whole[1:]), entries, rows, padded) for name, rows in parts
        )

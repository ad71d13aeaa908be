"""Plain-text tables for the command."""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines with aligned columns."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def layers_text(at: Mapping[str, Sequence[int]]) -> str:
    """The indices of a row, `i = 0-2, 4`."""
    return "; ".join(f"{key} = {ranges_text(values)}" for key, values in at.items())


def shape_text(shape: Sequence[int]) -> str:
    """`4096x2048`."""
    return "x".join(map(str, shape)) or "scalar"


def ranges_text(values: Sequence[int]) -> str:
    """Ascending numbers, `0-2, 4`."""
    if not values:
        return "none"
    starts = [values[0], *(b for a, b in pairwise(values) if b != a + 1)]
    ends = [*(a for a, b in pairwise(values) if b != a + 1), values[-1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

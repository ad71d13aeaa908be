"""A balance loss whose size depends on the layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from relax_core.model.balance import LoadBalance
from relax_core.testing.row import Row


@contextmanager
def balance_counts_of_every_rank(row: Row) -> Iterator[None]:
    """Every tensor rank's count of all ranks' tokens is added up once more."""
    with _scaled(row.parallel.get("tensor", 1)):
        yield


@contextmanager
def balance_divided_by_context(row: Row) -> Iterator[None]:
    """The loss of ranks that share a row is averaged where it should be summed."""
    with _scaled(1 / row.parallel.get("context", 1)):
        yield


@contextmanager
def _scaled(factor: float) -> Iterator[None]:
    fix = LoadBalance.fix_frequencies

    def scaled(self: Any) -> None:
        fix(self)
        self.frequency = {place: count_E * factor for place, count_E in self.frequency.items()}

    with patch.object(LoadBalance, "fix_frequencies", scaled):
        yield

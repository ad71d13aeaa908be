"""Pools of ranks that all tests of this folder share."""

import pytest
from relax_core.testing import RankPool


@pytest.fixture(scope="session")
def pools():
    """The pool of so many ranks; its processes start with its first row."""
    opened: dict[int, RankPool] = {}
    yield lambda size: opened.setdefault(size, RankPool(size))
    for pool in opened.values():
        pool.close()


@pytest.fixture(scope="session")
def reference(pools):
    """The training of a row on one rank, once for all rows that share it."""
    known = {}

    def of(row):
        alone = row.reference
        if repr(alone) not in known:
            known[repr(alone)] = pools(1).run(alone)
        return known[repr(alone)]

    return of

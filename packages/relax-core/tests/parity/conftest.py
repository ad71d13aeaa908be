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

"""Training one tiny model on any layout, and comparing it with one rank: tests and benchmarks share it.

A layout is a `Row`. To prove another one, add a row to `relax_core.testing.table.ROWS`; nothing else changes.
"""

from relax_core.testing.compare import differences
from relax_core.testing.pool import RankError, RankPool
from relax_core.testing.row import Row

__all__ = ["RankError", "RankPool", "Row", "differences"]

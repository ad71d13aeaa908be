"""Roles on Ray: trainer ranks, engines and rewards as processes of their own, on one machine or many.

The run loop stays the one of `relax_core.loop`; what it talks to lives elsewhere.
"""

import relax_core.upstream  # noqa: F401  Before anything here imports torch, in a process of Ray too.
from relax_core.cluster.config import ClusterConfig

__all__ = ["ClusterConfig"]

"""Roles on Ray: trainer ranks, engines and rewards as processes of their own, on one machine or many.

The run loop stays the one of `relax_core.loop`; what it talks to lives elsewhere.
"""

from relax_core.cluster.config import ClusterConfig

__all__ = ["ClusterConfig"]

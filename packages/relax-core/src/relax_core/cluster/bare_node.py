"""A Ray of a run's own starts without the processes that nobody asks: they cost seconds on a few cores."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import node

_log = logging.getLogger(__name__)

UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods that start what a run leaves alone: dashboard, logs in the driver's terminal, autoscaler."""


@contextmanager
def bare_node() -> Iterator[None]:
    """Within the block `ray.init` starts Ray's two servers and the agents that they need, and no more.

    Ray has settings for the three only where `ray start` begins it. Where its classes have changed all are
    started, with a line in the log.
    """
    starters = {name: getattr(node.Node, name, None) for name in UNUSED}
    if not all(map(callable, starters.values())):
        _log.info("this release of Ray starts its dashboard, log monitor and autoscaler too")
        yield
        return
    for name in UNUSED:
        setattr(node.Node, name, _nothing)
    try:
        yield
    finally:
        for name, starter in starters.items():
            setattr(node.Node, name, starter)


def _nothing(starting: Any, **_: object) -> None:
    # Read after the dashboard has been started.
    starting._webui_url = ""

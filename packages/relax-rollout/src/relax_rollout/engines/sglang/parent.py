"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import sys

PARENT = "RELAX_SGLANG_PARENT"
"""Environment variable with the process id of whoever started this process; without it nothing is done."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, also by SIGKILL (Linux only)."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        sys.exit("the process that started this one has ended")

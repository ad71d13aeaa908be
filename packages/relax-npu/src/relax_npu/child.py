"""A command that ends with ours: neither a key press nor a `kill` leaves it, and its container, behind."""

import signal
import subprocess
from collections.abc import Sequence
from typing import Any

INTERRUPTED = 128 + signal.SIGINT


def run(command: Sequence[str]) -> int:
    """Runs a command to its end and returns its exit code; 128 and the signal's number if one ended it.

    Ctrl-C reaches the command from the terminal; it is waited for, and so may end what it started. SIGTERM is
    passed on.
    """
    got: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def note(number: int, frame: Any) -> None:
        got.append(number)
        if number == signal.SIGTERM and started:
            started[0].terminate()

    # Before the command starts, so that no signal falls between.
    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        started.append(subprocess.Popen(command))
        if signal.SIGTERM in got:
            started[0].terminate()
        code = started[0].wait()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    if signal.SIGINT in got:
        return INTERRUPTED
    return code if code >= 0 else 128 - code

"""A server process of ours: started, watched and ended by its process id."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 15
PORTS = (20000, 32768)
"""Linux takes ports of outgoing connections from 32768 on."""


def free_port() -> int:
    """A TCP port of this host that is free now, and stays so while a server takes its time to start.

    It is below those that the system gives to outgoing connections, of which a busy host has many, and low
    enough that SGLang may add to it for ports of its own.

    Raises:
        OSError: none was found.
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free TCP port was found between {} and {} on this host".format(*PORTS))


class Process:
    """A command in a process group of its own.

    Args:
        command: to run.
        environment: added to this process's.
        log: file for its output, appended to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                list(command),
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the first process, and of its group."""
        return self._child.pid

    @property
    def code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._child.poll()

    def tail(self) -> str:
        """The log's last lines."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join(line[:300] for line in lines[-TAIL_LINES:])
        return "(no log)"

    def end(self, grace_s: float = 5.0) -> None:
        """End the group: asked first, then killed. Returns when the first process is gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal(number):
                break
            deadline = time.monotonic() + grace_s
            while self._group_lives() and time.monotonic() < deadline:
                self._child.poll()
                time.sleep(0.05)
        self._child.wait()

    def _signal(self, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)
            return True
        return False

    def _group_lives(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, 0)
            return True
        return False


def python(*arguments: str) -> list[str]:
    """A command of this environment's Python."""
    return [sys.executable, *arguments]

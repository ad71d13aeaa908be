"""One process per run directory, by a lock that dies with its process."""

import fcntl
import json
import os
import socket
from pathlib import Path

from relax_core.run.files import RunDirectoryError, writing

_held: set[Path] = set()


class RunLock:
    """Holds `.lock` of a run directory.

    The kernel gives the lock back when the process ends, however it ends, so a dead run never blocks. It is a
    record lock: a child made by fork does not inherit it and cannot outlive the run with it.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            RunDirectoryError: another run holds it (its process and host are named), or it cannot be written.
        """
        self._path = (folder / ".lock").resolve()
        # A record lock does not exclude its own process, and any second descriptor would drop it on closing.
        if self._path in _held:
            raise RunDirectoryError(f"{folder} is in use by this process")
        with writing(self._path):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 4096, 0)
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"{folder} is in use by {_describe(holder)}: wait for it, or choose another --run.name"
            ) from error
        with writing(self._path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(
                self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0
            )
        _held.add(self._path)

    def release(self) -> None:
        """Gives the lock back. Idempotent."""
        if self._path in _held:
            _held.discard(self._path)
            os.close(self._descriptor)


def _describe(holder: bytes) -> str:
    try:
        found = json.loads(holder)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"

"""`RankPool`: processes that stay alive for many rows, because starting one takes seconds."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from relax_core.testing.row import Row

# A host's own name need not resolve, and its other interfaces need not be up.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankError(RuntimeError):
    """A rank failed or did not answer; the text holds its traceback."""


class RankPool:
    """`size` processes on this host that meet over the loopback, at a port that was free.

    A rank that fails takes the pool with it: its partners would wait in a collective. The next job starts a
    new one.

    Args:
        size: ranks.
        device: the name of their device.
        timeout_s: of one job, and of every collective in it; may be changed between jobs.
    """

    def __init__(self, size: int, *, device: str = "cpu", timeout_s: float = 400) -> None:
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self._ranks: list[subprocess.Popen[str]] = []
        self._store: TCPStore | None = None
        self._number = 0

    def run(self, row: Row, kind: str = "train", **options: Any) -> Any:
        """Rank 0's result of a job of `relax_core.testing.jobs`.

        Raises:
            RankError: a rank failed.
        """
        if not self._ranks:
            self._start()
        assert self._store is not None
        self._number += 1
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.pt"
            job = {
                "kind": kind, "row": row.plain(), "number": self._number, "port": self._store.port,
                "out": str(out), "device": self.device, "timeout_s": self.timeout_s, "options": options,
            }  # fmt: skip
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(job) + "\n")
                rank.stdin.flush()
            self._wait(row)
            return torch.load(out, weights_only=False)

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()
        self._ranks = []
        self._store = None

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank)}
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "relax_core.testing.worker"],
                    env={**_LOOPBACK, **os.environ, **place, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def _wait(self, row: Row) -> None:
        """Until every rank has answered, or one has failed and its partners had time to say so too."""
        failed: dict[str, int] = {}
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as waiting:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                waiting.register(rank.stdout, selectors.EVENT_READ, number)
            while ready := waiting.get_map() and waiting.select(max(0.0, deadline - time.monotonic())):
                for key, _events in ready:
                    pipe: Any = waiting.unregister(key.fileobj).fileobj
                    line = pipe.readline()
                    error = json.loads(line)["error"] if line else "the process died"
                    if error is not None:
                        failed.setdefault(error, key.data)
                        deadline = min(deadline, time.monotonic() + 3)
            silent = sorted(key.data for key in waiting.get_map().values())
        if failed or silent:
            self.close()
            said = [f"rank {failed[error]}:\n{error}" for error in failed]
            said += [f"rank {number} did not answer" for number in silent]
            raise RankError(f"row {row.name!r}: " + "\n".join(said))

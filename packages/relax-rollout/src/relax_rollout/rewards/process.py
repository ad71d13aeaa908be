"""The parent's side of a reward worker process."""

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from relax_rollout.rewards.calls import Setup
from relax_rollout.rewards.results import RewardInput

START_LIMIT_S = 120.0
"""Time in which a worker must have imported its function."""

GRACE_S = 1.0
"""Time beyond its limit in which a call may still say that it ran late; then its process is ended."""

Answer = Callable[[dict[str, Any]], None]


class WorkerProcess:
    """One process and the calls it is working on; a thread reads its replies and ends it when a call runs
    late.

    Args:
        setup: what the worker imports, and its limits.
        on_free: called, on that thread, after calls have been answered or the process has ended.
    """

    def __init__(self, setup: Setup, on_free: Callable[["WorkerProcess"], None]) -> None:
        self.alive = True
        self._setup = setup
        self._on_free = on_free
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._calls: dict[int, tuple[Answer, float]] = {}
        self._next = 0
        self._ready = False
        self._closed = False
        self._deadline = time.monotonic() + START_LIMIT_S
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_rollout.rewards.worker", str(requests_out), str(replies_in)],
            pass_fds=(requests_out, replies_in),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(requests_out)
        os.close(replies_in)
        self._requests: BinaryIO = open(requests_in, "wb")  # noqa: SIM115, PTH123 - a descriptor, closed in _end
        self._replies = replies_out
        self._write(setup)
        threading.Thread(target=self._read, name="relax-rollout-reward", daemon=True).start()

    @property
    def load(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def reserve(self, answer: Answer) -> int:
        """Count a call as in progress; :meth:`send` must follow.

        ``answer`` gets the reply, ``{"failed": reason}`` or ``{"late": True}``, once.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._calls[number] = (answer, time.monotonic())
        return number

    def send(self, number: int, item: RewardInput) -> None:
        """Have the item judged, as the call of that number."""
        try:
            self._write((number, item))
        except (
            OSError,
            ValueError,
        ):  # it has just ended, and its thread may have failed all calls before this one
            self._answer(number, {"failed": "the reward worker had just ended"})
        except Exception as error:  # what cannot be pickled is the caller's fault, and is reported as such
            self._answer(number, {"failed": f"the input cannot be sent: {type(error).__name__}: {error}"})
            self._on_free(self)

    def close(self) -> None:
        """End the process and what it started; calls in progress fail."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, message: object) -> None:
        data = pickle.dumps(message)
        with self._write_lock:
            self._requests.write(data)
            self._requests.flush()

    def _answer(self, number: int, message: dict[str, Any]) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
        if call is not None:
            call[0](message)

    def _time_left(self) -> float:
        """Seconds until the process must be ended, or, while nothing is due, until to ask again."""
        if not self._ready:
            return self._deadline - time.monotonic()
        with self._lock:
            starts = [started for _, started in self._calls.values()]
        return (
            min(starts) + self._setup.timeout_s + GRACE_S - time.monotonic()
            if starts
            else min(1.0, self._setup.timeout_s)
        )

    def _read(self) -> None:
        buffer = b""
        reason = "the reward worker ended by itself (out of memory, or a crash in native code)"
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while True:
                left = self._time_left()
                if left <= 0:
                    blocked = "another call kept its process from answering, which was ended"
                    reason = blocked if self._ready else f"no worker was ready within {START_LIMIT_S:g} s"
                    break
                if not selector.select(left):
                    continue
                data = os.read(self._replies, 1 << 16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                fatal = self._take(lines)
                if fatal:
                    reason = fatal
                    break
        self._end(reason)

    def _take(self, lines: list[bytes]) -> str | None:
        """Answer the calls of some replies; the reason if the worker cannot go on."""
        for line in lines:
            message = json.loads(line)
            if "fatal" in message:
                return str(message["fatal"])
            if "ready" in message:
                now = time.monotonic()
                with self._lock:
                    self._ready = True
                    self._calls = {number: (answer, now) for number, (answer, _) in self._calls.items()}
            else:
                self._answer(message["number"], message)
                self._on_free(self)
        return None

    def _end(self, reason: str) -> None:
        with self._lock:
            self.alive = False
            calls, self._calls = self._calls, {}
        self._kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what was not yet written has no reader
            self._requests.close()
        os.close(self._replies)
        now = time.monotonic()
        reason = "the reward runner was closed" if self._closed else reason
        for answer, started in calls.values():
            late = self._ready and now - started >= self._setup.timeout_s
            answer({"late": True} if late else {"failed": reason})
        self._on_free(self)

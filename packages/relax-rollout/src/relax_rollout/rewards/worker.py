"""The program inside a reward worker process: ``python -m relax_rollout.rewards.worker REQUESTS REPLIES``.

REQUESTS and REPLIES are inherited file descriptors. Requests are pickles (the parent is trusted); replies are
JSON lines (the parent need not trust this process). The first request is a :class:`Setup`, answered by
``{"ready": true}`` or ``{"fatal": reason}``; every other is ``(number, RewardInput)``.
"""

import asyncio
import json
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from relax_rollout.rewards.calls import Setup, as_result, resolve
from relax_rollout.rewards.results import RewardInput, RewardResult


def reply_of(result: RewardResult, started: float) -> dict[str, Any]:
    """The JSON form of a result."""
    return {
        "score": float(result.score),
        "correct": None if result.correct is None else bool(result.correct),
        "extracted": None if result.extracted is None else str(result.extracted)[:2000],
        "error": None if result.error is None else str(result.error)[:2000],
        **_signature(started),
    }


def error_reply(error: BaseException, started: float) -> dict[str, Any]:
    """The JSON form of a failure."""
    text = f"{type(error).__name__}: {error}"[:2000]
    return {"failed": text, **_signature(started)}


def _signature(started: float) -> dict[str, Any]:
    """How long it took, who did it, and when."""
    return {
        "elapsed_s": time.perf_counter() - started,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "ended_at": time.time(),
    }


class _LateError(BaseException):
    """The call ran over its limit; no ``except Exception`` on the way swallows it.

    It saves starting another process where Python code can be interrupted. The parent ends a process that
    goes on regardless.
    """


def _raise_late(*_: object) -> None:
    raise _LateError


class Server:
    """Answers requests until the parent closes the pipe, then ends at once, whatever it is doing."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write one reply line."""
        with self._lock:
            self._replies.write(json.dumps(message).encode() + b"\n")
            self._replies.flush()

    def read_into(self, put: Callable[[tuple[int, RewardInput]], None]) -> None:
        """Read requests for ever, on a thread of its own."""

        def read() -> None:
            while True:
                try:
                    request = pickle.load(self._requests)
                except (EOFError, OSError):
                    os._exit(0)
                put(request)

        threading.Thread(target=read, daemon=True).start()

    def serve(self) -> None:
        """Set up, then answer."""
        setup: Setup = pickle.load(self._requests)
        sys.path[:] = setup.path
        if setup.memory_gib is not None:
            limit = int(setup.memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            function = resolve(setup.function)
        except Exception as error:  # told to the parent, which reports it
            self.send({"fatal": f"{type(error).__name__}: {error}"})
            return
        self.send({"ready": True})
        if setup.concurrent:
            asyncio.run(self._serve_concurrently(function, setup.timeout_s))
        else:
            self._serve_in_turn(function, setup.timeout_s)

    def _serve_in_turn(self, function: Callable[..., Any], timeout_s: float) -> None:
        inbox: queue.SimpleQueue[tuple[int, RewardInput]] = queue.SimpleQueue()
        self.read_into(inbox.put)
        signal.signal(signal.SIGALRM, _raise_late)
        while True:
            number, item = inbox.get()
            started = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                message = reply_of(as_result(function(item)), started)
            except _LateError:
                message = {"late": True}
            except (Exception, SystemExit) as error:  # told to the parent, which reports it
                message = error_reply(error, started)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self.send({"number": number, **message})

    async def _serve_concurrently(self, function: Callable[..., Any], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()

        async def one(number: int, item: RewardInput) -> None:
            started = time.perf_counter()
            try:
                async with asyncio.timeout(timeout_s):
                    message = reply_of(as_result(await function(item)), started)
            except TimeoutError as error:
                late = time.perf_counter() - started >= timeout_s
                message = {"late": True} if late else error_reply(error, started)
            except (Exception, SystemExit) as error:  # told to the parent, which reports it
                message = error_reply(error, started)
            self.send({"number": number, **message})

        def start(request: tuple[int, RewardInput]) -> None:
            task = loop.create_task(one(*request))
            running.add(task)
            task.add_done_callback(running.discard)

        def put(request: tuple[int, RewardInput]) -> None:
            loop.call_soon_threadsafe(start, request)

        self.read_into(put)
        await asyncio.Event().wait()


def main() -> None:
    """Serve on the two descriptors of the command line; what the reward prints goes to standard error."""
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    os.dup2(2, 1)
    with open(requests, "rb") as source, open(replies, "wb") as sink:
        Server(source, sink).serve()


if __name__ == "__main__":
    main()

"""Where a measured process waits for its turn: both sides of `step.py` use it, so it needs Python alone.

The measured process connects to the socket named by FIRST_RUN_SOCKET, says that it is ready for its first
step, and then obeys one order at a time: `score` some completions, take a `step`, or `stop`.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client

SOCKET = "FIRST_RUN_SOCKET"

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""


class Gate:
    """The measured process's end of the connection."""

    def __init__(self) -> None:
        self._connection = Client(os.environ[SOCKET])
        self._begun: tuple[float, float] | None = None
        self._phases: dict[str, float] = {}

    def wait(self, score: Callable[[Sequence[Example]], list[list[float]]]) -> None:
        """Returns when the next step may begin; answers `score` orders until then, and ends on `stop`."""
        if self._begun is None:
            self._connection.send("ready")
        while True:
            order, argument = self._connection.recv()
            if order == "score":
                self._connection.send(score(argument))
            elif order == "stop":
                self._connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
                os._exit(0)
            else:
                break
        self._phases = {}
        self._begun = time.perf_counter(), time.process_time()

    def done(self, tokens: int, reward: float) -> None:
        """Reports the step that has just ended: its times, the tokens it trained on, and its mean reward."""
        assert self._begun is not None
        wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        work = {"tokens": tokens, "reward": reward, "phases": self._phases}
        self._connection.send({"wall_s": wall, "cpu_s": cpu, **work})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block for a phase of the step."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.book(name, time.perf_counter() - begun)

    def book(self, name: str, seconds: float) -> None:
        """Counts seconds for a phase of the step."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds

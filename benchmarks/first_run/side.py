"""The driving end of a measured process (the other end: `gate.py`)."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gate import SOCKET, Example

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class StepTimes:
    """One step: seconds of clock and processor, tokens trained on, mean reward, seconds by phase."""

    wall_s: float
    cpu_s: float
    tokens: int
    reward: float
    phases: dict[str, float]


class Side:
    """A process that has come to its first step and waits there.

    Attributes:
        name: of the side.
        startup_s: seconds from its start to there.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = folder / "log.txt"
        socket = folder / "socket"
        with Listener(str(socket), family="AF_UNIX") as listener, self._log.open("wb") as log:
            begun = time.perf_counter()
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**environment, SOCKET: str(socket)}
            )
            try:
                self._connection: Connection = self._accepted(listener)
                self._receive()
            except BaseException:
                self.kill()
                raise
            self.startup_s = time.perf_counter() - begun

    def score(self, examples: Sequence[Example]) -> list[list[float]]:
        """Log-probs of every completion token under the initial weights."""
        self._connection.send(("score", examples))
        scores: list[list[float]] = self._receive()
        return scores

    def step(self) -> StepTimes:
        """Lets it take one step."""
        self._connection.send(("step", None))
        return StepTimes(**self._receive())

    def stop(self) -> float:
        """Ends it; returns the largest memory it ever had resident, in GiB."""
        self._connection.send(("stop", None))
        peak: float = self._receive()
        self._process.wait(60)
        return peak

    def kill(self) -> None:
        """Ends it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _accepted(self, listener: Listener) -> Connection:
        # A process that dies before it connects would leave `accept` waiting for ever.
        listener._listener._socket.settimeout(0.05)
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                return listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    break
        raise self._failure()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError as error:
            raise self._failure() from error

    def _failure(self) -> RuntimeError:
        tail = self._log.read_text(errors="replace")[-4000:]
        return RuntimeError(f"{self.name} ended or did not start; the end of its output:\n{tail}")

"""One server: its process (if it is ours), its calls, and whether it is still the one it was."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.http import (
    Http,
    ServerRefusedError,
    ServerUnreachableError,
    relax_answer,
    relax_call,
)
from relax_rollout.engines.sglang.process import Process

log = logging.getLogger(__name__)

POLL_S = 0.25


class ServerRestartedError(EngineError):
    """A server answered that is another process than before: what it was told is lost."""


class Server:
    """One server.

    Args:
        name: for texts.
        http: its calls.
        start: starts its process; None for a server that is not ours.
        start_timeout_s: seconds for it to come up.
    """

    def __init__(
        self, name: str, http: Http, start: Callable[[], Process] | None, start_timeout_s: float
    ) -> None:
        self.name = name
        self.http = http
        self.boot: str | None = None
        self.description: dict[str, Any] = {}
        self.in_flight = 0
        self.restarts = 0
        self.behind = False
        self.process = start() if start is not None else None
        self._start = start
        self._start_timeout_s = start_timeout_s

    @property
    def ours(self) -> bool:
        """Whether we started it and may start it again."""
        return self._start is not None

    async def wait_ready(self) -> None:
        """Wait until it serves, and learn what it serves.

        Raises:
            EngineError: it ended, did not come up in time, or has not our plugin.
        """
        deadline = asyncio.get_running_loop().time() + self._start_timeout_s
        while not await self.http.alive(timeout_s=5.0):
            if self.process is not None and self.process.code is not None:
                raise EngineError(
                    f"{self.name} ended with code {self.process.code} while it started; its log "
                    f"{self.process.log} ends:\n{self.process.tail()}"
                )
            if asyncio.get_running_loop().time() > deadline:
                where = f"; its log {self.process.log} ends:\n{self.process.tail()}" if self.process else ""
                raise EngineError(f"{self.name} did not come up in {self._start_timeout_s:g} s{where}")
            await asyncio.sleep(POLL_S)
        self.boot = None
        try:
            self.description = await self.control("describe")
        except ServerRefusedError as error:
            raise EngineError(
                f"{self.name} is no server of `python -m relax_rollout.engines.sglang.serve`: {error}"
            ) from error
        self.boot = self.description["boot"]

    async def control(self, call: str, *, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """A control call of ours.

        Raises:
            ServerRestartedError: the server is another process than when it was described.
            ServerRefusedError: it refused.
            ServerUnreachableError: no answer.
        """
        body = relax_call(call, **fields)
        try:
            answer = relax_answer(await self.http.control("/weights_checker", body, timeout_s=timeout_s))
        except ServerRefusedError as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            self._check_boot(refusal)
            text = f"{self.name} refused {call}: {refusal['error']}"
            raise ServerRefusedError(text, error.status, refusal["kind"]) from error
        self._check_boot(answer)
        return answer

    def _check_boot(self, answer: Mapping[str, Any]) -> None:
        if self.boot is not None and answer["boot"] != self.boot:
            raise ServerRestartedError(f"{self.name} was restarted and has lost what it was told")

    async def restart(self) -> None:
        """End our process, if it still runs, and start another.

        Raises:
            EngineError: the server is not ours, or did not come up.
        """
        if self._start is None:
            raise EngineError(f"{self.name} is not ours to restart")
        self.restarts += 1
        if self.process is not None:
            await asyncio.to_thread(self.process.end)
        log.warning("%s is started again (%d so far)", self.name, self.restarts)
        self.process = self._start()
        await self.wait_ready()

    async def close(self) -> None:
        """End it, if it is ours."""
        with contextlib.suppress(RuntimeError):
            await self.http.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)


def _refusal(error: ServerRefusedError) -> dict[str, Any] | None:
    """Our plugin's own words in a refused call, if it is one."""
    import json

    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(error)
        body = json.loads(text[text.index("{") :])
        found: dict[str, Any] = json.loads(body["message"])
        return found if "error" in found else None
    return None


def log_file(folder: Path, place: int) -> Path:
    """Where the server at this place of the list writes."""
    return folder / f"sglang-{place}.log"


__all__ = ["Server", "ServerRestartedError", "ServerUnreachableError", "log_file"]

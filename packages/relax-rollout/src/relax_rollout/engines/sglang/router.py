"""sglang-router in front of the servers: it shares requests out; control calls do not go through it."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx

from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.http import Http
from relax_rollout.engines.sglang.process import Process

log = logging.getLogger(__name__)

POLL_S = 0.25


class Router:
    """One router.

    Args:
        http: its calls.
        start: starts its process, given the servers' URLs; None for a router that is not ours.
        start_timeout_s: seconds for it to come up and know its servers.
    """

    name = "router"

    def __init__(
        self, http: Http, start: Callable[[Sequence[str]], Process] | None, start_timeout_s: float
    ) -> None:
        self.http = http
        self.in_flight = 0
        self.restarts = 0
        self.process: Process | None = None
        self._start = start
        self._start_timeout_s = start_timeout_s

    @property
    def ours(self) -> bool:
        """Whether we start it and may start it again."""
        return self._start is not None

    @property
    def ended(self) -> bool:
        """Whether its process, if it is ours, is gone."""
        return self.process is not None and self.process.code is not None

    async def use(self, urls: Iterable[str]) -> None:
        """Send requests to these servers and no others; returns when the router finds all of them healthy.

        Raises:
            EngineError: it ended, or did not come so far in time.
        """
        wanted = set(urls)
        if self.process is None and self._start is not None:
            self.process = self._start(sorted(wanted))
        deadline = asyncio.get_running_loop().time() + self._start_timeout_s
        asked: set[str] = set()
        known = await self._workers()
        while known is None or {w["url"] for w in known if w["is_healthy"]} != wanted:
            where = f"; its log {self.process.log} ends:\n{self.process.tail()}" if self.process else ""
            if self.ended:
                raise EngineError(f"the router ended while it started{where}")
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(
                    f"the router {self.http.url} has not the servers {', '.join(sorted(wanted))} after "
                    f"{self._start_timeout_s:g} s, but {known}{where}"
                )
            if known is not None:
                await self._change(known, wanted, asked)
            await asyncio.sleep(POLL_S)
            known = await self._workers()

    async def _workers(self) -> list[dict[str, Any]] | None:
        """The servers that it knows; None if it does not answer."""
        try:
            found: list[dict[str, Any]] = (await self.http.get("/workers"))["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return found

    async def _change(self, known: Sequence[Mapping[str, Any]], wanted: set[str], asked: set[str]) -> None:
        """Ask, once each, that servers be left out or taken in; it is done some time later."""
        left_out = {w["url"]: w["id"] for w in known if w["url"] not in wanted | asked}
        for worker in left_out.values():
            await self.http.delete(f"/workers/{worker}")
        taken_in = sorted(wanted - asked - {worker["url"] for worker in known})
        for url in taken_in:
            await self.http.once("/workers", {"url": url}, None)
        asked |= {*left_out, *taken_in}

    async def restart(self, urls: Sequence[str]) -> None:
        """Start it again after it ended.

        Raises:
            EngineError: see :meth:`use`.
        """
        if self.process is not None:
            await asyncio.to_thread(self.process.end)
        self.process = None
        self.restarts += 1
        log.warning("the router is started again (%d so far)", self.restarts)
        await self.use(urls)

    async def close(self) -> None:
        """End it, if it is ours."""
        await self.http.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)

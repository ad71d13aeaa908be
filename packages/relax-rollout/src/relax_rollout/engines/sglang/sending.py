"""Requests on their way to the servers and back: shared out, watched, drawn again where a server is lost."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from relax_rollout.engine import EngineError, EngineStateError, WeightsLostError
from relax_rollout.engines.checks import check_requests
from relax_rollout.engines.sglang.fleet import LOST, Fleet
from relax_rollout.engines.sglang.flight import Flight, to_body, to_completion, to_single_body
from relax_rollout.engines.sglang.http import ServerRefusedError, ServerUnreachableError
from relax_rollout.engines.sglang.router import Router
from relax_rollout.engines.sglang.server import Server
from relax_rollout.requests import Completion, Request

log = logging.getLogger(__name__)

BATCH = 32
"""Requests of one HTTP call at most."""


class Sending(Fleet):
    """A fleet that draws completions."""

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See :meth:`relax_rollout.RolloutEngine.generate`."""
        if self._released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before generate")
        if not requests:
            return []
        await self._ready()
        facts = self._servers[0].description
        patch = facts.get("patch")
        check_requests(
            requests,
            self._flights,
            vocabulary=facts["vocabulary"],
            context=self._context,
            patch=None if patch is None else (patch[0], patch[1]),
        )
        flights = [Flight(request, self._next_rid()) for request in requests]
        self._flights |= {flight.request.id: flight for flight in flights}
        tasks = [asyncio.create_task(self._fly(part)) for part in _parts(flights, self._batch)]
        try:
            await asyncio.gather(*tasks)
            return [flight.done() for flight in flights]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            for flight in flights:
                self._flights.pop(flight.request.id, None)

    @property
    def _batch(self) -> int:
        return BATCH if self._router is None else 1

    def _next_rid(self) -> str:
        self._count += 1
        return f"{self._uid}.{self._count}."

    async def _fly(self, part: list[Flight]) -> None:
        """Bring some requests to an end, on another server or on the same one again where one is lost."""
        for attempt in range(self.config.restarts + 2):
            await self._until_open(part)
            live = [flight for flight in part if flight.completion is None]
            if not live:
                return
            target = self._target()
            target.in_flight += len(live)
            for flight in live:
                flight.server = target
            try:
                answers = await self._sample(target, live)
            except LOST as error:
                self._last_error = str(error)
                log.warning("%d requests are drawn again (attempt %d): %s", len(live), attempt + 2, error)
                await self._recover_behind(target)
                continue
            except ServerRefusedError as error:
                self._last_error = str(error)
                raise
            finally:
                target.in_flight -= len(live)
                for flight in live:
                    flight.server = None
            try:
                for flight, answer in zip(live, answers, strict=True):
                    flight.completion = to_completion(flight, answer)
                    self.acceptance.add(flight.completion.drafts)
            except EngineError as error:
                self._last_error = str(error)
                raise
            return
        raise EngineError(f"{len(part)} requests were lost with their servers too often: {self._last_error}")

    def _target(self) -> Server | Router:
        """Where the next requests go."""
        if self._router is not None:
            return self._router
        return min((s for s in self._servers if not s.behind), key=lambda s: s.in_flight)

    async def _until_open(self, part: Sequence[Flight]) -> None:
        """Wait until requests may be sent, or these have all been aborted."""

        def may_go() -> bool:
            held = self._paused or self._updating or self._released
            return self._closed or self._broken is not None or not held or all(f.completion for f in part)

        async with self._change:
            await self._change.wait_for(may_go)
        if self._closed:
            raise EngineStateError("the engine was closed while the request was in flight")
        if self._broken is not None:
            raise EngineStateError(f"the engine serves no weights: {self._broken}")
        if all(server.behind for server in self._servers):
            raise WeightsLostError("every server was restarted and waits for an update of its weights")

    async def _sample(self, target: Server | Router, flights: Sequence[Flight]) -> Any:
        routed = isinstance(target, Router)
        body = to_single_body(flights[0]) if routed else to_body(flights)
        call = asyncio.create_task(target.http.sample(body))
        watched = [self._watch_of(server) for server in self._behind(target)]
        try:
            await asyncio.wait({call, *watched, self._closing()}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                answer = call.result()
                # SGLang answers one request that asks for one completion with an object, several with a list.
                return [answer] if isinstance(answer, dict) else answer
            if self._closed:
                raise EngineStateError("the engine was closed while the request was in flight")
            raise next(watch.exception() for watch in watched if watch.done()) or ServerUnreachableError(
                f"{target.name} does not answer"
            )
        except ServerRefusedError as error:
            if routed and error.status >= 500:
                raise ServerUnreachableError(f"through the router: {error}") from error
            raise
        except (asyncio.CancelledError, *LOST):
            if not call.done():
                await self._give_up(target, flights)
            raise
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _give_up(self, target: Server | Router, flights: Sequence[Flight]) -> None:
        for server in self._behind(target):
            task = asyncio.create_task(self._abort_at(server, list(flights)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({task}, timeout=5)

    def _behind(self, target: Server | Router) -> list[Server]:
        """The servers that may have a request which was sent there."""
        return self._servers if isinstance(target, Router) else [target]

    def _at(self, server: Server, flights: Iterable[Flight]) -> list[Flight]:
        """Those that a server may have."""
        return [
            flight
            for flight in flights
            if flight.server is not None and flight.server in (server, self._router)
        ]

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See :meth:`relax_rollout.RolloutEngine.abort`."""
        await self._ready()
        flights = [
            flight
            for name, flight in self._flights.items()
            if flight.completion is None and (request_ids is None or name in request_ids)
        ]
        if not flights:
            return
        for flight in flights:
            flight.aborted = True
            if flight.server is None:
                flight.completion = Completion(flight.request.id, (), (), (), "abort")
        await self._notify()
        for server in self._servers:
            mine = self._at(server, flights)
            if mine:
                await self._abort_at(server, mine)

    async def _abort_at(self, server: Server, flights: Sequence[Flight]) -> None:
        if self._paused:
            # A request that keeps its cache would end with its next token, which a pause holds back.
            await self._set_paused(server, "retract")
        for flight in flights:
            await server.http.control("/abort_request", {"rid": flight.rid})


def _parts(flights: Sequence[Flight], batch: int) -> list[list[Flight]]:
    """Requests by HTTP call: those of one prompt together, so that its prefill is shared."""
    ordered = sorted(flights, key=lambda flight: flight.request.prompt_ids)
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]

"""The engine ``sglang``: servers of SGLang behind the protocol of :class:`relax_rollout.RolloutEngine`."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from relax_rollout.engine import EngineError, EngineStateError, Health, WeightUpdateError
from relax_rollout.engines.checks import check_requests
from relax_rollout.engines.sglang.broadcaster import Broadcaster
from relax_rollout.engines.sglang.config import SglangConfig
from relax_rollout.engines.sglang.fleet import LOST, Fleet
from relax_rollout.engines.sglang.flight import Flight, to_body, to_completion
from relax_rollout.engines.sglang.http import ServerRefusedError, ServerUnreachableError
from relax_rollout.engines.sglang.server import Server
from relax_rollout.engines.sglang.update import Bucket, Update, faults_of, served_weights, together
from relax_rollout.requests import Completion, PauseMode, Request
from relax_rollout.update_check import UpdateCheck
from relax_rollout.weights.files import BucketFiles

log = logging.getLogger(__name__)

BATCH = 32
"""Requests of one HTTP call at most."""


class SglangEngine(Fleet):
    """Servers of SGLang, started here or elsewhere.

    Every server serves the same version, or the engine serves none: a server that cannot be brought to it is
    started again and caught up, and where that fails generate raises.

    Args:
        config: where the model is and how it is served.

    Raises:
        ValueError: SGLang is to be started here and is not installed, or the checkpoint cannot be served.
    """

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See :meth:`relax_rollout.RolloutEngine.generate`."""
        if self._released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before generate")
        if not requests:
            return []
        await self._ready()
        facts = self._servers[0].description
        vocabulary, context = facts["vocabulary"], self._context
        check_requests(requests, self._flights, vocabulary=vocabulary, context=context)
        flights = [Flight(request, self._next_rid()) for request in requests]
        self._flights |= {flight.request.id: flight for flight in flights}
        tasks = [asyncio.create_task(self._fly(part)) for part in _parts(flights)]
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
            server = min((s for s in self._servers if not s.behind), key=lambda s: s.in_flight)
            server.in_flight += len(live)
            for flight in live:
                flight.server = server
            try:
                answers = await self._sample(server, live)
            except LOST as error:
                self._last_error = str(error)
                log.warning("%d requests are drawn again (attempt %d): %s", len(live), attempt + 2, error)
                await self._recover(server)
                continue
            except ServerRefusedError as error:
                self._last_error = str(error)
                raise
            finally:
                server.in_flight -= len(live)
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
            raise EngineStateError("every server was restarted and waits for an update of its weights")

    async def _sample(self, server: Server, flights: Sequence[Flight]) -> Any:
        call = asyncio.create_task(server.http.once("/generate", to_body(flights), None))
        watch = asyncio.create_task(self._watch(server))
        ended = asyncio.create_task(self._wait_closed())
        try:
            await asyncio.wait({call, watch, ended}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if ended.done():
                raise EngineStateError("the engine was closed while the request was in flight")
            watch.result()
            raise ServerUnreachableError(f"{server.name} does not answer")
        except asyncio.CancelledError:
            task = asyncio.create_task(self._abort_at(server, list(flights)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({task}, timeout=5)
            raise
        finally:
            for task in (call, watch, ended):
                task.cancel()
            await asyncio.gather(call, watch, ended, return_exceptions=True)

    async def _wait_closed(self) -> None:
        async with self._change:
            await self._change.wait_for(lambda: self._closed)

    async def begin_update(self, version: int) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.begin_update`."""
        await self._ready()
        if self._released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before an update")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version is {version!r}; it must be a whole number of at least 0")
        if self._update is not None:
            log.warning("the update to version %d was never ended and is dropped", self._update.version)
            await self._drop()
        served, _ = served_weights(self._servers[0])
        files = BucketFiles(self.config.folder) if self.config.transport == "files" else None
        update = Update(version, UpdateCheck(served, version), files)
        self._update = update
        await self._at_all(update.begin_at)
        if self.config.transport == "broadcast":
            self._broadcaster = self._broadcaster or Broadcaster(self.config)
            await self._broadcaster.connect(self._servers)
        return update.check.dtypes()

    async def load(self, bucket: Mapping[str, Tensor]) -> None:
        """See :meth:`relax_rollout.RolloutEngine.load`."""
        update = self._open_update()
        try:
            tensors = update.accept(bucket)
            if not tensors:
                return
            if self._broadcaster is not None:
                entries = await self._broadcaster.send(self._servers, update, tensors)
                update.buckets.append(Bucket(tuple(entries), None))
                return
            update.buckets.append(await asyncio.to_thread(update.pack_file, tensors))
            place = len(update.buckets) - 1
            await self._at_all(lambda server: update.send_to(server, place, self.config.retries))
        except (WeightUpdateError, EngineError):
            await self._drop()
            raise

    async def end_update(self) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.end_update`.

        Raises:
            EngineError: a server serves other values than it was given, or keeps a derived tensor of the old
                weights; the text names them. The engine serves nothing until an update succeeds.
        """
        update = self._open_update()
        try:
            update.check_complete()
        except WeightUpdateError:
            await self._drop()
            raise
        async with self._control:
            self._updating = True
            try:
                digests = await self._commit(update)
            except BaseException as error:
                # Some servers may have changed: none serves until all are of one version again.
                await self._break(f"the update to version {update.version} failed: {error}")
                raise
            finally:
                self._updating = False
                self._update = None
            await self._resume_if_wanted()
        return digests

    async def _commit(self, update: Update) -> dict[str, str]:
        await self._at_all(lambda server: self._set_paused(server, "retract"))
        results = await self._at_all(update.commit_at, lost=update)
        wrong = {
            server.name: faults
            for server, result in zip(self._servers, results, strict=True)
            if (faults := faults_of(update.expected, result))
        }
        if wrong:
            told = "; ".join(f"{name}: {', '.join(faults[:8])}" for name, faults in wrong.items())
            raise EngineError(
                f"after the update to version {update.version} these do not belong to it: {told}"
            )
        self._version, self._broken = update.version, None
        for server in self._servers:
            server.behind = False
        self._unused = len(update.check.unused)
        if self._kept is not None:
            self._kept.close()
        self._kept = update if self.config.keep_weights and update.files is not None else None
        if self._kept is None:
            update.close()
        given = update.check.given_as
        return {given[name]: digest for name, digest in results[0]["digests"].items()}

    def _open_update(self) -> Update:
        if self._closed:
            raise EngineStateError("the engine is closed; create another one")
        if self._update is None:
            raise EngineStateError("no update is open; call begin_update first (a refused update is dropped)")
        return self._update

    async def _drop(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.close()
        for server in self._servers:
            with contextlib.suppress(EngineError):
                await server.control("discard")

    async def _break(self, reason: str) -> None:
        self._broken = self._last_error = reason
        await self._notify()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See :meth:`relax_rollout.RolloutEngine.pause`."""
        await self._ready()
        async with self._control:
            self._paused = True
            how = "in_place" if mode == "keep" else "retract"
            await self._at_all(lambda server: self._set_paused(server, how))
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.resume`."""
        await self._ready()
        async with self._control:
            self._paused = False
            await self._resume_if_wanted()

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
            mine = [flight for flight in flights if flight.server is server]
            if mine:
                await self._abort_at(server, mine)

    async def _abort_at(self, server: Server, flights: Sequence[Flight]) -> None:
        if self._paused:
            # A request that keeps its cache would end with its next token, which a pause holds back.
            await self._set_paused(server, "retract")
        for flight in flights:
            await server.http.control("/abort_request", {"rid": flight.rid})

    async def release_memory(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.release_memory`."""
        await self._ready()
        if self._flights and not self._paused:
            sent = sum(flight.server is not None for flight in self._flights.values())
            raise EngineStateError(
                f"{sent} requests are running and {len(self._flights) - sent} waiting; wait for them, abort "
                "or pause before the memory is released"
            )
        async with self._control:
            if self._released:
                return
            self._released = True
            # The barrier: nothing is scheduled between the last token and the release, nor after it.
            await self._at_all(lambda server: self._set_paused(server, "retract"))
            await self._at_all(lambda server: self._set_released(server, True))

    async def reclaim_memory(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.reclaim_memory`."""
        await self._ready()
        async with self._control:
            if self._released:
                await self._at_all(lambda server: self._set_released(server, False))
                self._released = False
                await self._resume_if_wanted()

    async def health(self) -> Health:
        """See :meth:`relax_rollout.RolloutEngine.health`."""
        running = waiting = 0
        answered = not self._closed
        if answered:
            try:
                await self._ready()
                for status in await together([s.control("status", timeout_s=10) for s in self._servers]):
                    running += status["running"]
                    waiting += status["waiting"]
            except (EngineError, EngineStateError) as error:
                answered, self._last_error = False, str(error)
        waiting += sum(f.server is None and f.completion is None for f in self._flights.values())
        facts = self._servers[0].description
        return Health(
            ready=answered and not self._released and self._broken is None,
            version=self._version,
            running=running,
            waiting=waiting,
            paused=self._paused,
            released=self._released,
            updating=None if self._update is None else self._update.version,
            device=facts.get("device", self.config.device),
            dtype=facts.get("dtype", self.config.dtype),
            parameters=facts.get("parameters", 0),
            unused_tensors=self._unused,
            last_error=self._last_error,
        )

    async def close(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.close`."""
        if self._closed:
            return
        self._closed = True
        await self._notify()
        if self._prepare is not None:
            self._prepare.cancel()
            await asyncio.gather(self._prepare, return_exceptions=True)
        if self.config.urls:
            for server in self._servers:
                with contextlib.suppress(EngineError):
                    await self._abort_at(server, [f for f in self._flights.values() if f.server is server])
        await asyncio.gather(*(server.close() for server in self._servers))
        for update in (self._update, self._kept):
            if update is not None:
                update.close()
        self._scratch.cleanup()


def _parts(flights: Sequence[Flight]) -> list[list[Flight]]:
    """Requests by HTTP call: those of one prompt together, so that its prefill is shared."""
    ordered = sorted(flights, key=lambda flight: flight.request.prompt_ids)
    return [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]


def create(**options: Any) -> SglangEngine:
    """Entry point: an engine from the fields of :class:`SglangConfig`.

    Raises:
        ValueError: an option that is no field, or a value that the config refuses.
    """
    known = [field.name for field in fields(SglangConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"the sglang engine has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return SglangEngine(SglangConfig(**options))

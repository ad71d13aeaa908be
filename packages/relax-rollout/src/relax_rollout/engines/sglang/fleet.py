"""The servers of one engine: started, watched, paused, and brought back to the others' version when lost."""

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_rollout.engine import EngineError, EngineStateError, TransferError
from relax_rollout.engines.sglang import launch
from relax_rollout.engines.sglang.acceptance import Acceptance
from relax_rollout.engines.sglang.broadcaster import Broadcaster
from relax_rollout.engines.sglang.config import SglangConfig
from relax_rollout.engines.sglang.flight import Flight
from relax_rollout.engines.sglang.http import Http, ServerRefusedError, ServerUnreachableError
from relax_rollout.engines.sglang.parent import PARENT
from relax_rollout.engines.sglang.process import Process, free_port
from relax_rollout.engines.sglang.router import Router
from relax_rollout.engines.sglang.server import Server, ServerRestartedError, log_file
from relax_rollout.engines.sglang.update import Update, faults_of, together
from relax_rollout.engines.sglang.view import max_context, write_view
from relax_rollout.engines.sglang.way import Way
from relax_rollout.weights.ipc import IpcSender

log = logging.getLogger(__name__)

LOST = (ServerUnreachableError, ServerRestartedError)
CLOSING = "closing"


class Fleet:
    """The servers, and the state that all of them are to be in.

    Args:
        config: where the model is and how it is served.

    Raises:
        ValueError: SGLang is to be started here and is not installed, or the checkpoint cannot be served.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.config = config
        self.acceptance = Acceptance(
            config.min_draft_rate if config.draft_tokens else None, config.draft_window
        )
        self._scratch = tempfile.TemporaryDirectory(prefix="relax-sglang-")
        self._uid = secrets.token_hex(4)
        self._count = 0
        self._servers: list[Server] = []
        self._prepare: asyncio.Task[None] | None = None
        self._flights: dict[str, Flight] = {}
        self._context = config.context or max_context(Path(config.model))
        self._version = config.version
        self._update: Update | None = None
        self._kept: Update | None = None
        self._unused = 0
        self._paused = self._released = self._updating = self._closed = False
        self._broken: str | None = None
        self._last_error: str | None = None
        self._change = asyncio.Condition()
        self._control = asyncio.Lock()
        self._recovering: dict[str, asyncio.Lock] = {}
        self._broadcaster: Broadcaster | None = None
        self._ipc: IpcSender | None = None
        self._way: Way | None = None
        self._travelling: asyncio.Task[None] | None = None
        self._router: Router | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._recovery: asyncio.Task[None] | None = None
        try:
            self._start()
        except BaseException:
            for server in self._servers:
                if server.process is not None:
                    server.process.end()
            self._scratch.cleanup()
            raise

    def _start(self) -> None:
        config = self.config
        timeout, retries = config.call_timeout_s, config.retries
        logs = Path(config.log_folder or self._scratch.name)
        logs.mkdir(parents=True, exist_ok=True)
        if config.router is not None:
            self._router = self._make_router(config.router, logs / "sglang-router.log")
        for url in config.urls:
            self._servers.append(
                Server(f"server {url}", Http(url, timeout, retries), None, config.start_timeout_s)
            )
        if config.urls:
            return
        launch.require_processor(Path(config.model))
        launch.require_sglang()
        folder = Path(self._scratch.name) / "model"
        folder.mkdir()
        served = write_view(Path(config.model), folder)
        for place in range(config.servers):
            port = free_port()

            def start(port: int = port, place: int = place) -> Process:
                # What the configuration says now: drafting may have been turned off.
                command, environment = (
                    launch.command(self.config, served, port),
                    launch.environment(self.config),
                )
                return Process(command, environment, log_file(logs, place))

            http = Http(f"http://127.0.0.1:{port}", timeout, retries)
            self._servers.append(Server(f"server {place}", http, start, config.start_timeout_s))

    def _make_router(self, router: str, log_path: Path) -> Router:
        config = self.config
        timeout, retries = config.call_timeout_s, config.retries
        if router != "start":
            return Router(Http(router, timeout, retries), None, config.start_timeout_s)
        launch.require_router()
        port, metrics_port = free_port(), free_port()
        parent = {PARENT: str(os.getpid())}

        def start(urls: Sequence[str]) -> Process:
            return Process(launch.router_command(config, port, metrics_port, urls), parent, log_path)

        return Router(Http(f"http://127.0.0.1:{port}", timeout, retries), start, config.start_timeout_s)

    async def _ready(self) -> None:
        if self._closed:
            raise EngineStateError("the engine is closed; create another one")
        if self._prepare is None:
            self._prepare = asyncio.create_task(self._wait_all())
        await asyncio.shield(self._prepare)

    async def _wait_all(self) -> None:
        await together([server.wait_ready() for server in self._servers])
        if self._router is not None:
            await self._router.use([server.http.url for server in self._servers])
        for server in self._servers:
            if server.description["version"] != self.config.version and self.config.urls:
                log.warning(
                    "%s serves version %d; it is taken for version %d until the first update",
                    server.name,
                    server.description["version"],
                    self.config.version,
                )

    def _watch_of(self, server: Server) -> asyncio.Task[None]:
        """The watch over a server, one for all requests: it ends, with an error, when the server is lost."""
        watch = self._watches.get(server.name)
        if watch is None or watch.done():
            watch = self._watches[server.name] = asyncio.create_task(self._watch(server))
            watch.add_done_callback(lambda done: done.cancelled() or done.exception())
        return watch

    def _closing(self) -> asyncio.Task[None]:
        """Ends when the engine is closed."""
        if CLOSING not in self._watches:
            self._watches[CLOSING] = asyncio.create_task(self._wait_closed())
        return self._watches[CLOSING]

    async def _wait_closed(self) -> None:
        async with self._change:
            await self._change.wait_for(lambda: self._closed)

    async def _end_watches(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        """Raises when the server is lost: its process ended, or its scheduler does not answer.

        A lost server of ours behind the router is started again here: its end breaks the calls that it had,
        and those alone are made again.
        """
        while True:
            try:
                await self._watch_once(server)
            except LOST as error:
                if self._router is None or not server.ours:
                    raise
                log.warning("%s; it is recovered", error)
                await self._recover(server)

    async def _watch_once(self, server: Server) -> None:
        for _ in range(20):
            await asyncio.sleep(self.config.hang_timeout_s / 80)
            if server.process is not None and server.process.code is not None:
                raise ServerUnreachableError(
                    f"{server.name} ended with code {server.process.code}; its log ends:\n"
                    f"{server.process.tail()}"
                )
        await self._answers_within(server, self.config.hang_timeout_s)

    async def _answers_within(self, server: Server, seconds: float) -> None:
        try:
            await asyncio.wait_for(server.control("status"), seconds)
        except TimeoutError as error:
            raise ServerUnreachableError(f"{server.name} has not answered for {seconds:g} s") from error

    async def _recover_behind(self, target: Server | Router) -> None:
        """Bring back what was lost where requests were sent; however many ask, it is done once."""
        if isinstance(target, Server):
            await self._recover(target)
            return
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover_routed(target))
            self._recovery.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._recovery)

    async def _recover_routed(self, router: Router) -> None:
        await together([self._recover(server) for server in self._servers])
        serving = [server.http.url for server in self._servers if not server.behind]
        if not router.ended:
            await router.use(serving)
        elif router.restarts < self.config.restarts:
            await router.restart(serving)
        else:
            raise EngineError(f"the router was lost {router.restarts + 1} times; given up")

    async def _recover(self, server: Server) -> None:
        """Bring a server that was lost to the present version, paused as the others are.

        Raises:
            EngineError: that was not possible.
        """
        async with self._recovering.setdefault(server.name, asyncio.Lock()):
            if self._closed:
                raise EngineStateError("the engine was closed while the request was in flight")
            with contextlib.suppress(EngineError):
                if server.process is None or server.process.code is None:
                    await self._answers_within(server, min(10.0, self.config.hang_timeout_s))
                    return
            if server.ours:
                if server.restarts >= self.config.restarts:
                    raise EngineError(f"{server.name} was lost {server.restarts + 1} times; given up")
                await server.restart()
            else:
                await server.wait_ready()
            await self._rejoin(server)

    async def _rejoin(self, server: Server) -> None:
        """Bring a server that has just started to the present version, paused as the others are."""
        if self._paused or self._updating:
            await self._set_paused(server, "retract")
        if self._kept is not None:
            try:
                await self._catch_up(server, self._kept)
                return
            except (ServerRefusedError, TransferError) as error:
                # The process that packed them has ended, or has begun to write the next ones.
                if not self._kept.elsewhere:
                    raise
                self._kept = None
                log.warning("%s: %s", server.name, error)
        if self._version != self.config.version:
            server.behind = True
            log.warning("%s has the checkpoint's weights and waits for the next update", server.name)

    async def _stop_drafting(self) -> None:
        """Turn speculative decoding off for good, server by server; their requests are drawn again."""
        rate = self.config.min_draft_rate
        if self.config.urls:
            log.warning(
                "start the servers given by urls without drafts: fewer than %.0f %% stand", 100 * rate
            )
            return
        log.warning("speculative decoding is turned off: fewer than %.0f %% of the drafts stand", 100 * rate)
        self.config = replace(self.config, draft_tokens=0)
        for server in self._servers:
            async with self._recovering.setdefault(server.name, asyncio.Lock()):
                await server.restart()
                server.restarts -= 1
                await self._rejoin(server)

    async def _catch_up(self, server: Server, update: Update) -> None:
        await update.catch_up(server, self.config.retries)
        await self._set_paused(server, "retract")
        wrong = faults_of(update.expected_of(server), await update.commit_at(server))
        if wrong:
            raise EngineError(f"{server.name} serves other weights than it was given: {', '.join(wrong[:8])}")
        if not (self._paused or self._updating):
            await self._set_paused(server, None)

    async def _at_all(
        self, call: Callable[[Server], Awaitable[Any]], *, lost: Update | None = None
    ) -> list[Any]:
        """Make a call at every server; one that is lost is recovered, caught up and asked again."""

        async def at(server: Server) -> Any:
            for _ in range(self.config.restarts + 1):
                try:
                    return await call(server)
                except LOST as error:
                    self._last_error = str(error)
                    log.warning("%s; it is recovered", error)
                    boot = server.boot
                    await self._recover(server)
                    update = lost or self._update
                    if update is not None and server.boot != boot:
                        await update.catch_up(server, self.config.retries)
                        if self._updating:
                            await self._set_paused(server, "retract")
            raise EngineError(f"{server.name} was lost too often: {self._last_error}")

        return await together([at(server) for server in self._servers])

    async def _resume_if_wanted(self) -> None:
        if not (self._paused or self._released or self._broken):
            await self._at_all(lambda server: self._set_paused(server, None))
        await self._notify()

    async def _set_paused(self, server: Server, mode: str | None) -> None:
        """Pause by a mode of SGLang, or go on; returns when the scheduler has done it."""
        for _ in range(20):
            if mode is None:
                await server.http.control("/continue_generation", {})
            else:
                await server.http.control("/pause_generation", {"mode": mode})
            status = await server.control("status")
            if status["paused"] == (mode is not None) and not (mode == "retract" and status["running"]):
                return
            await asyncio.sleep(0.05)
        raise EngineError(f"{server.name} cannot be {'paused' if mode else 'resumed'}")

    async def _set_released(self, server: Server, released: bool) -> None:
        """Release or take back, once: these calls of SGLang must not be repeated blindly."""
        path = "/release_memory_occupation" if released else "/resume_memory_occupation"
        for _ in range(self.config.retries + 1):
            if (await server.control("status"))["released"] == released:
                return
            with contextlib.suppress(ServerUnreachableError):
                await server.http.once(path, {}, self.config.call_timeout_s)
        if (await server.control("status"))["released"] != released:
            raise ServerUnreachableError(f"{server.name} did not answer {path}")

    async def _notify(self) -> None:
        async with self._change:
            self._change.notify_all()

"""The engine ``sglang``: servers of SGLang behind the protocol of :class:`relax_rollout.RolloutEngine`."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor

from relax_rollout.engine import (
    EngineError,
    EngineStateError,
    Health,
    SharesRefusedError,
    TransferError,
    WeightUpdateError,
)
from relax_rollout.engines.sglang.broadcaster import Broadcaster, connect
from relax_rollout.engines.sglang.config import SglangConfig, Transport
from relax_rollout.engines.sglang.http import ServerRefusedError
from relax_rollout.engines.sglang.sending import Sending
from relax_rollout.engines.sglang.server import Server
from relax_rollout.engines.sglang.update import (
    DamagedBucketError,
    Update,
    faults_of,
    served_weights,
    together,
)
from relax_rollout.engines.sglang.way import choose
from relax_rollout.requests import PauseMode
from relax_rollout.update_check import UpdateCheck
from relax_rollout.weights.broadcast import Meeting
from relax_rollout.weights.bucket import Bucket
from relax_rollout.weights.files import BucketFiles
from relax_rollout.weights.ipc import IpcSender
from relax_rollout.weights.receiver import ShareRefusedError

log = logging.getLogger(__name__)


class SglangEngine(Sending):
    """Servers of SGLang, started here or elsewhere.

    Every server serves the same version, or the engine serves none: a server that cannot be brought to it is
    started again and caught up, and where that fails generate raises.

    Args:
        config: where the model is and how it is served.

    Raises:
        ValueError: SGLang is to be started here and is not installed, or the checkpoint cannot be served.
    """

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.begin_update`."""
        await self._ready()
        if self._released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before an update")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version is {version!r}; it must be a whole number of at least 0")
        if self._update is not None:
            log.warning("the update to version %d was never ended and is dropped", self._update.version)
            await self._drop()
        if self.config.draft_tokens and not self.acceptance.pays:
            await self._stop_drafting()
        served, _ = served_weights(self._servers[0])
        self._update = Update(version, UpdateCheck(served, version, kept), replay=self.config.replay)
        await self._at_all(self._update.begin_at)
        return self._update.check.dtypes()

    async def load(self, bucket: Mapping[str, Tensor]) -> None:
        """See :meth:`relax_rollout.RolloutEngine.load`.

        It returns while the bucket still travels, so that the caller makes the next one meanwhile; what went
        wrong on the way is raised by the next call.
        """
        update = self._open_update()
        try:
            tensors = update.accept(bucket)
            if not tensors:
                return
            if self._way is None:
                self._way = await choose(self.config, self._servers, next(iter(tensors.values())).device)
            await self._open_way(update, self._way.transport)
            if self._broadcaster is not None:
                packed = await asyncio.to_thread(self._broadcaster.pack, update, tensors)
                await self._arrived()
                sending = self._broadcaster.send(self._servers, update, packed)
            else:
                buckets = await asyncio.to_thread(update.pack, tensors)
                await self._arrived()
                sending = self._send(update, buckets)
            self._travelling = asyncio.create_task(sending)
        except (WeightUpdateError, EngineError):
            await self._drop()
            raise

    async def _open_way(self, update: Update, transport: Transport) -> None:
        if transport == "files":
            update.files = update.files or BucketFiles(self.config.folder)
        elif transport == "ipc":
            if self._kept is not None and self._kept is not update:
                # Its memory is written anew: a server that is lost from here on gets this update.
                self._kept.close()
                self._kept = None
            update.ipc = self._ipc = self._ipc or IpcSender()
        elif not update.buckets:
            self._broadcaster = self._broadcaster or Broadcaster(self.config)
            await self._broadcaster.connect(self._servers)

    @property
    def receivers(self) -> int:
        """See :class:`relax_rollout.PackedLoading`."""
        return self.config.tensor_parallel * len(self._servers)

    async def sees(self, handles: Sequence[str]) -> bool:
        """See :class:`relax_rollout.PackedLoading`."""
        await self._ready()
        answers = await together([server.control("sees", handles=list(handles)) for server in self._servers])
        return all(answer["sees"] for answer in answers)

    async def connect(self, meeting: Meeting, first_rank: int) -> None:
        """See :class:`relax_rollout.PackedLoading`."""
        await self._ready()
        each = self.config.tensor_parallel
        places = enumerate(self._servers)
        try:
            await together([connect(server, meeting, first_rank + each * place) for place, server in places])
        except EngineError as error:
            raise TransferError(f"the group for weights did not come together: {error}") from error

    async def load_packed(self, parts: Sequence[Bucket]) -> None:
        """See :class:`relax_rollout.PackedLoading`; what servers open stays until the update has ended."""
        update = self._open_update()
        try:
            await self._arrived()
            packed = update.accept_packed(parts)
            if packed[0].lasts and not packed[0].entries:
                return
            if self._kept is not None and self._kept.elsewhere:
                self._kept = None
            update.elsewhere = True
            update.buckets.append(packed)
            if packed[0].lasts:
                await self._at_all(partial(self._send_last, update))
            else:
                await self._receive(update)
        except ServerRefusedError as error:
            await self._drop()
            if error.kind == ShareRefusedError.__name__:
                raise SharesRefusedError(str(error)) from error
            raise
        except (WeightUpdateError, EngineError):
            await self._drop()
            raise

    async def _send_last(self, update: Update, server: Server) -> None:
        await update.send_to(server, len(update.buckets) - 1, self.config.retries)

    async def _receive(self, update: Update) -> None:
        """Have every server take a bucket that another process broadcasts; nobody can be caught up."""
        message = update.message(len(update.buckets) - 1)
        try:
            answers = await together([server.control("receive", **message) for server in self._servers])
        except EngineError as error:
            raise TransferError(f"a bucket did not reach every server: {error}") from error
        if wrong := sorted({name for answer in answers for name in answer["damaged"]}):
            raise DamagedBucketError(f"other bytes than were sent arrived for {', '.join(wrong[:8])}")

    async def _send(self, update: Update, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            update.buckets.append((bucket,))
            await self._at_all(partial(self._send_last, update))

    async def _arrived(self) -> None:
        """Wait for the bucket that travels, and raise what went wrong with it."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            await travelling

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Name memory whose tensors "ipc" need not copy, such as a trainer's parameter buffers.

        It must stay where it is for as long as the engine lives, and as it is from ``load`` to the end of
        each update.
        """
        self._ipc = IpcSender(tensors)

    async def end_update(self) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.end_update`.

        Raises:
            EngineError: a server serves other values than it was given, or keeps a derived tensor of the old
                weights; the text names them. The engine serves nothing until an update succeeds.
        """
        update = self._open_update()
        try:
            await self._arrived()
            update.check_complete()
        except (WeightUpdateError, EngineError):
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
            if (faults := faults_of(update.expected_of(server), result))
        }
        if wrong:
            told = "; ".join(f"{name}: {', '.join(faults[:8])}" for name, faults in wrong.items())
            raise EngineError(
                f"after the update to version {update.version} these do not belong to it: {told}"
            )
        self._version, self._broken = update.version, None
        for server in self._servers:
            server.behind = False
        if self._router is not None:
            await self._router.use(server.http.url for server in self._servers)
        self._unused = len(update.check.unused)
        if self._kept is not None:
            self._kept.close()
        self._kept = update if self.config.keep_weights and update.lasts else None
        if self._kept is None:
            update.close()
        given = update.check.given_as | update.check.kept
        return {given[name]: digest for name, digest in results[0]["digests"].items()}

    def _open_update(self) -> Update:
        if self._closed:
            raise EngineStateError("the engine is closed; create another one")
        if self._update is None:
            raise EngineStateError("no update is open; call begin_update first (a refused update is dropped)")
        return self._update

    async def _drop(self) -> None:
        update, self._update = self._update, None
        with contextlib.suppress(EngineError):
            await self._arrived()
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
        if self._travelling is not None:
            self._travelling.cancel()
            await asyncio.gather(self._travelling, return_exceptions=True)
        if self._ipc is not None:
            self._ipc.close()
        await self._end_watches()
        if self.config.urls:
            for server in self._servers:
                with contextlib.suppress(EngineError):
                    await self._abort_at(server, self._at(server, self._flights.values()))
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(server.close() for server in self._servers))
        for update in (self._update, self._kept):
            if update is not None:
                update.close()
        self._scratch.cleanup()


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

"""`EngineGroup`: several engine processes as one `RolloutEngine`, which outlives any of them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from relax_rollout import (
    Completion,
    Health,
    PauseMode,
    Request,
    TransferError,
    WeightsLostError,
    WeightUpdateError,
)
from relax_rollout.weights.broadcast import Meeting
from relax_rollout.weights.bucket import Bucket
from torch import Tensor

from relax_core.cluster.errors import ClusterError, EnginesLostError, WeightsGoneError
from relax_core.cluster.gate import Gate
from relax_core.cluster.members import Member, Members, Start, answer_of
from relax_core.cluster.shared_tensors import pack
from relax_core.run.trace import ProcessSpans

_log = logging.getLogger(__name__)

_RETRY_S = 0.5

Again = Callable[[int], AsyncIterator[Any]]
"""Gives the weights of a version once more, as buckets in Ray's shared memory.

Raises WeightsGoneError if the trainer has others by now, or is busy.
"""


@dataclass
class _Weights:
    """What the engines serve and keep, and where its buckets lie in Ray's shared memory, if they do."""

    version: int
    kept: Collection[str] = ()
    buckets: list[Any] = field(default_factory=list)
    digests: Mapping[str, str] = field(default_factory=dict)
    stored: bool = True


class EngineGroup:
    """Spreads requests over engines by prompt; the prompts of a group stay together.

    An engine that dies, or does not answer in time, is started anew and given the weights that the others
    serve, while those go on; its requests are sampled again, elsewhere if there is another. All calls are
    made on one event loop.

    Args:
        start: starts an engine.
        count: engines.
        max_restarts: of one engine, between two updates.
        timeout_s: in which an engine must answer every call but sampling.
        end: ends the process of an engine, whatever it is doing; `ray.kill` if None.

    Raises:
        ClusterError: from any call, once an engine has died too often.
    """

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        max_restarts: int,
        timeout_s: float = 300.0,
        end: Callable[[Any], None] | None = None,
    ) -> None:
        self._members = Members(
            start,
            count,
            max_restarts=max_restarts,
            timeout_s=timeout_s,
            end=ray.kill if end is None else end,
            bring_up=self._bring_up,
        )
        self._gate = Gate()
        self._updating = asyncio.Lock()
        self._serving: _Weights | None = None
        self._coming: _Weights | None = None
        self._updated: list[Member] = []
        self.again: Again | None = None
        self._update_s, self._sampled = 0.0, False

    async def open(self) -> list[int]:
        """Waits until every engine is ready; their process ids. From here on they are watched."""
        return await self._members.open(lambda: self._gate.is_open)

    async def pids(self) -> list[int]:
        """Process ids of the engines that are alive."""
        return [pid for _, pid in await self._members.each("pid")]

    async def spans(self) -> list[ProcessSpans]:
        """What each live engine did since it was asked last; the run has a timeline."""
        return [spans for _, spans in await self._members.each("spans")]

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`; waits while the memory is released."""
        async with self._gate.passing():
            parts = self._parts(requests)
            answers = await asyncio.gather(*(self._generate(part) for part in parts))
        by_id = {completion.request_id: completion for answer in answers for completion in answer}
        return [by_id[request.id] for request in requests]

    def _parts(self, requests: Sequence[Request]) -> list[list[Request]]:
        """As many parts as there are live engines, equal in requests as far as whole prompts allow."""
        count = max(1, sum(member.awake for member in self._members.all))
        prompts: dict[Any, list[Request]] = {}
        for request in requests:
            # Questions about pictures are often the same text.
            pictures = tuple(id(one.picture) for one in request.pictures)
            prompts.setdefault((request.prompt_ids, pictures), []).append(request)
        parts: list[list[Request]] = [[] for _ in range(count)]
        for group in prompts.values():
            min(parts, key=len).extend(group)
        return [part for part in parts if part]

    async def _generate(self, part: Sequence[Request]) -> list[Completion]:
        while True:
            member = await self._members.free()
            member.requests += len(part)
            actor = member.actor
            try:
                completions: list[Completion] = await answer_of(actor.generate.remote(part))
                return completions
            except RayActorError as error:
                self._members.bury(member, actor, error)
            except WeightsLostError as error:
                if not member.behind:
                    _log.warning("engine %d: %s", member.number, error)
                    member.behind = True
                    self._members.see_to(member)
            finally:
                member.requests -= len(part)

    async def _bring_up(self, member: Member) -> None:
        """Has the engine serve what the others do, or waits a moment where that cannot be had just now.

        It is live then: an update that comes takes it along.
        """
        try:
            # Without its memory it could not take weights.
            await self._members.reclaimed.wait()
            # An update in progress goes on without this engine, which then gets what came of it.
            async with self._updating:
                if member.behind and self._members.reclaimed.is_set():
                    await self._synchronise(member)
                    member.live, member.behind = True, False
            return
        except (WeightsGoneError, TransferError) as error:
            if not member.live:
                _log.info("engine %d waits for weights: %s", member.number, error)
            member.live = True
        await self._members.announce()
        await asyncio.sleep(_RETRY_S)

    async def _synchronise(self, member: Member) -> None:
        weights = self._serving
        if weights is None:
            return
        if weights.stored:
            await self._members.in_time(member.actor.begin_update.remote(weights.version, weights.kept))
            for bucket in weights.buckets:
                await self._members.in_time(member.actor.load.remote(bucket))
        else:
            assert self.again is not None, "whoever does not store weights gives them again"
            begun = False
            async for bucket in self.again(weights.version):
                if not begun:
                    await self._members.in_time(
                        member.actor.begin_update.remote(weights.version, weights.kept)
                    )
                    begun = True
                await self._members.in_time(member.actor.load.remote(bucket))
        digests = await self._members.in_time(member.actor.end_update.remote())
        if digests != weights.digests:
            raise ClusterError(
                f"engine {member.number} was given version {weights.version} once more and serves other "
                "values than the engines before it: its host or its memory is broken"
            )
        _log.info("engine %d serves version %d again", member.number, weights.version)

    @property
    def updated(self) -> list[tuple[int, int]]:
        """The engines that the open update began with, by number, and which start of each it is."""
        return [(member.number, member.starts) for member in self._updated]

    async def see(self, offers: Mapping[int, Sequence[str]]) -> bool:
        """Whether every engine can open the memory that it is offered; see `MemoryProbe`."""

        live = [member for member in self._members.all if member.live]
        answers = await asyncio.gather(
            *(self._members.each("sees", offers[m.number], among=[m]) for m in live)
        )
        return all(seen for answer in answers for _, seen in answer)

    async def hosts(self) -> list[str]:
        """Where the live engines are."""
        return [host for _, host in await self._members.each("host")]

    async def receivers(self) -> int:
        """Processes of the open update's engines that take part in a broadcast."""
        return sum(count for _, count in await self._members.each("receivers", among=self._updated))

    async def connect(self, meeting: Meeting) -> None:
        """Has the engines of the open update join a group, behind its first rank.

        Raises:
            TransferError: they did not come together; none waits for one that has died.
        """

        async def join(member: Member, first: int) -> bool:
            if await self._members.each("connect", meeting, first, among=[member]):
                return True
            await asyncio.to_thread(meeting.give_up)
            return False

        counts = await self._members.each("receivers", among=self._updated)
        first, calls = 1, []
        for member, count in counts:
            calls.append(join(member, first))
            first += count
        answers = await asyncio.gather(*calls)
        if len(counts) < len(self._updated) or not all(answers):
            raise TransferError("an engine died before it had joined the group for weights")

    async def load_packed(self, parts: Mapping[int, Sequence[Bucket]], *, broadcast: bool = False) -> None:
        """Has every engine load a bucket that a rank has packed.

        Args:
            parts: by engine; see `PackedLoading.load_packed`.
            broadcast: an engine that dies takes those with it that wait for the same bytes.

        Raises:
            TransferError: it did not arrive; the update is dropped, to be begun anew.
        """
        assert self._coming is not None, "no update is open"
        self._coming.stored = False
        try:
            live = [member for member in self._updated if member.live]
            with self._busy():
                answers = await asyncio.gather(
                    *(self._members.each("load_packed", parts[m.number], among=[m]) for m in live),
                )
            if broadcast and not all(answers):
                raise TransferError("an engine died while weights were broadcast")
        except BaseException:
            self.drop_update()
            raise

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """See `RolloutEngine.begin_update`."""
        self._update_s, self._sampled = 0.0, any(member.requests for member in self._members.all)
        while True:
            await self._members.live()
            if self._coming is None:
                await self._updating.acquire()
            self._coming = _Weights(version, tuple(kept))
            with self._busy():
                answers = await self._members.each("begin_update", version, self._coming.kept)
            if answers:
                break
            self.drop_update()
        self._updated = [member for member, _ in answers]
        dtypes: Mapping[str, str] = answers[0][1]
        return dtypes

    async def load(self, bucket: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine.load`."""
        await self.load_shared(ray.put(pack(bucket)))

    async def load_shared(self, bucket: Any) -> None:
        """Loads a bucket that lies in Ray's shared memory already, and keeps it for engines to come."""
        assert self._coming is not None, "no update is open"
        self._coming.buckets.append(bucket)
        try:
            with self._busy():
                await self._members.each("load", bucket, among=self._updated)
        except BaseException:
            self.drop_update()
            raise

    async def end_update(self) -> Mapping[str, str]:
        """See `RolloutEngine.end_update`; the digests are the same in every engine, or it is refused."""
        assert self._coming is not None, "no update is open"
        try:
            with self._busy():
                answers = await self._members.each("end_update", among=self._updated)
            for member, digests in answers[1:]:
                if digests != answers[0][1]:
                    names = sorted(n for n in digests if digests[n] != answers[0][1].get(n))
                    raise WeightUpdateError(
                        f"engines {answers[0][0].number} and {member.number} serve different values of "
                        f"{', '.join(names[:5])} after the same update"
                    )
            if not answers:
                raise EnginesLostError("every engine died during a weight update")
            self._serving = replace(self._coming, digests=answers[0][1])
            for member, _ in answers:
                member.behind = False
            for member in self._members.all:
                member.restarts = 0
        finally:
            self.drop_update()
        return self._serving.digests

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """The engines are asked for something of an update, and do not sample meanwhile."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._update_s += time.perf_counter() - began

    def exposed(self, seconds: float) -> float:
        """Of the seconds that the last update took, those at most in which no engine sampled."""
        return min(seconds, self._update_s) if self._sampled else seconds

    def drop_update(self) -> None:
        """Gives up the open update, if there is one; a new one may be begun."""
        if self._coming is not None:
            self._coming = None
            self._updating.release()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`."""
        await self._members.each("pause", mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._members.each("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        await self._members.each("abort", request_ids)

    async def release_memory(self) -> None:
        """Lets the requests in flight end, holds later ones back, and then gives up the engines' memory."""
        await self._gate.close()
        await self._hold_back()
        await self._members.each("release_memory")

    async def _hold_back(self) -> None:
        """Waits for engines that start; from here on none is started or given weights that it lacks.

        One that is live and lacks weights may have to wait for a trainer that has died, which is seen to only
        after this: the next update takes it along.
        """
        await self._members.until(lambda: all(member.live for member in self._members.all))
        async with self._updating:
            self._members.reclaimed.clear()

    async def reclaim_memory(self) -> None:
        """Takes the memory back and lets the requests in that have waited."""
        await self._members.each("reclaim_memory")
        self._members.reclaimed.set()
        self._gate.open()

    async def rest(self, count: int) -> None:
        """Gives up the memory of the first `count` engines; their requests wait, later ones go elsewhere."""
        shared = self._members.all[:count]
        for member in shared:
            member.resting = True
        await self._hold_back()
        await self._members.each("pause", "recompute", among=shared)
        await self._members.each("release_memory", among=shared)

    async def wake(self) -> None:
        """Ends `rest`: what waited goes on, its context computed anew."""
        shared = [member for member in self._members.all if member.resting]
        await self._members.each("reclaim_memory", among=shared)
        await self._members.each("resume", among=shared)
        self._members.reclaimed.set()
        for member in shared:
            member.resting = False
        await self._members.announce()

    async def health(self) -> Health:
        """That of the first live engine."""
        await self._members.free()
        answers = await self._members.each("health")
        first: Health = answers[0][1]
        return first

    async def close(self) -> None:
        """Ends the engines."""
        await self._members.close()

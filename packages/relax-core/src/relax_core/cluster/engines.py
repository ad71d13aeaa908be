"""`EngineGroup`: several engine processes as one `RolloutEngine`, which outlives any of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from relax_rollout import Completion, Health, PauseMode, Request, WeightUpdateError
from torch import Tensor

from relax_core.cluster.errors import ClusterError, EnginesLostError
from relax_core.cluster.gate import Gate
from relax_core.cluster.shared_tensors import pack

_log = logging.getLogger(__name__)

_START_SHARE = 6
"""An engine may take so many times `timeout_s` to start: it loads a model."""

Start = Callable[[int], Any]
"""Starts the engine of a number: an actor handle of `EngineHost`."""


@dataclass
class _Member:
    number: int
    actor: Any
    live: bool = True
    resting: bool = False
    restarts: int = 0
    requests: int = 0

    @property
    def awake(self) -> bool:
        """It can take requests."""
        return self.live and not self.resting


@dataclass
class _Weights:
    """What the engines serve: the version, what they keep, and where its buckets lie in shared memory."""

    version: int
    kept: Collection[str] = ()
    buckets: list[Any] = field(default_factory=list)
    digests: Mapping[str, str] = field(default_factory=dict)


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
        self._start = start
        self._timeout_s = timeout_s
        self._end = ray.kill if end is None else end
        self._watching: asyncio.Task[None] | None = None
        self._max_restarts = max_restarts
        self._members = [_Member(number, start(number)) for number in range(count)]
        self._gate = Gate()
        self._reclaimed = asyncio.Event()
        self._reclaimed.set()
        self._changed = asyncio.Condition()
        self._updating = asyncio.Lock()
        self._serving: _Weights | None = None
        self._coming: _Weights | None = None
        self._updated: list[_Member] = []
        self._reviving: set[asyncio.Task[None]] = set()
        self._failure: ClusterError | None = None
        self._closed = False

    async def open(self) -> list[int]:
        """Waits until every engine is ready; their process ids. From here on they are watched."""
        pids = [await self._ask(member, "pid") for member in self._members]
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return pids

    async def _watch(self) -> None:
        """Asks the engines that sample, again and again, for what takes their sampling thread a moment."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            if self._gate.is_open:
                awake = [member for member in self._members if member.awake]
                await self._each("abort", (), among=awake)

    async def pids(self) -> list[int]:
        """Process ids of the engines that are alive."""
        return [pid for _, pid in await self._each("pid")]

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`; waits while the memory is released."""
        async with self._gate.passing():
            parts = self._parts(requests)
            answers = await asyncio.gather(*(self._generate(part) for part in parts))
        by_id = {completion.request_id: completion for answer in answers for completion in answer}
        return [by_id[request.id] for request in requests]

    def _parts(self, requests: Sequence[Request]) -> list[list[Request]]:
        """As many parts as there are live engines, equal in requests as far as whole prompts allow."""
        count = max(1, sum(member.awake for member in self._members))
        prompts: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            prompts.setdefault(request.prompt_ids, []).append(request)
        parts: list[list[Request]] = [[] for _ in range(count)]
        for group in prompts.values():
            min(parts, key=len).extend(group)
        return [part for part in parts if part]

    async def _generate(self, part: Sequence[Request]) -> list[Completion]:
        while True:
            member = await self._free_member()
            member.requests += len(part)
            actor = member.actor
            try:
                completions: list[Completion] = await _answer(actor.generate.remote(part))
                return completions
            except RayActorError as error:
                self._bury(member, actor, error)
            finally:
                member.requests -= len(part)

    async def _free_member(self) -> _Member:
        """The live engine with the fewest requests; waits for one to be revived."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or any(member.live and not member.resting for member in self._members)
                )
            )
        if self._failure is not None:
            raise self._failure
        awake = (member for member in self._members if member.awake)
        return min(awake, key=lambda member: (member.requests, member.number))

    def _bury(self, member: _Member, actor: Any, error: RayActorError | None) -> None:
        """Takes a dead engine out, once, or one that hangs (no error), and sees to another in its place.

        Args:
            member: whose it is, or was.
            actor: the engine.
            error: of the call; None if there was no answer.
        """
        if self._closed and error is not None:
            raise error
        if self._closed or not member.live or member.actor is not actor:
            return
        member.live = False
        if error is None:
            why = f"did not answer within cluster.engine_timeout_s = {self._timeout_s:g}"
            self._end(actor)
        else:
            why = f"died ({str(error).splitlines()[0]})"
        _log.warning("engine %d %s: it is started anew", member.number, why)
        task = asyncio.get_running_loop().create_task(self._revive(member))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, member: _Member) -> None:
        try:
            while not member.live:
                member.restarts += 1
                if member.restarts > self._max_restarts:
                    raise ClusterError(
                        f"engine {member.number} died {member.restarts} times since the last update; "
                        f"cluster.max_restarts is {self._max_restarts}"
                    )
                # While the trainer has the device there is no memory for another engine.
                await self._reclaimed.wait()
                member.actor = self._start(member.number)
                try:
                    async with asyncio.timeout(_START_SHARE * self._timeout_s):
                        await _answer(member.actor.pid.remote())
                    # An update in progress goes on without this engine, which then gets what came of it.
                    async with self._updating:
                        await self._synchronise(member)
                        member.live = True
                except RayActorError as error:
                    _log.warning("engine %d died while it started: %s", member.number, error)
                except TimeoutError:
                    self._end(member.actor)
                    _log.warning("engine %d did not start in time", member.number)
        except Exception as error:
            self._failure = error if isinstance(error, ClusterError) else ClusterError(str(error))
        async with self._changed:
            self._changed.notify_all()

    async def _in_time(self, call: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._timeout_s):
            return await _answer(call)

    async def _synchronise(self, member: _Member) -> None:
        weights = self._serving
        if weights is None:
            return
        await self._in_time(member.actor.begin_update.remote(weights.version, weights.kept))
        for bucket in weights.buckets:
            await self._in_time(member.actor.load.remote(bucket))
        digests = await self._in_time(member.actor.end_update.remote())
        if digests != weights.digests:
            raise ClusterError(
                f"engine {member.number} was given version {weights.version} once more and serves other "
                "values than the engines before it: its host or its memory is broken"
            )
        _log.info("engine %d serves version %d again", member.number, weights.version)

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """See `RolloutEngine.begin_update`."""
        while True:
            await self._free_member()
            if self._coming is None:
                await self._updating.acquire()
            self._coming = _Weights(version, tuple(kept))
            answers = await self._each("begin_update", version, self._coming.kept)
            if answers:
                break
            self._drop_update()
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
            await self._each("load", bucket, among=self._updated)
        except BaseException:
            self._drop_update()
            raise

    async def end_update(self) -> Mapping[str, str]:
        """See `RolloutEngine.end_update`; the digests are the same in every engine, or it is refused."""
        assert self._coming is not None, "no update is open"
        try:
            answers = await self._each("end_update", among=self._updated)
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
            for member in self._members:
                member.restarts = 0
        finally:
            self._drop_update()
        return self._serving.digests

    def _drop_update(self) -> None:
        if self._coming is not None:
            self._coming = None
            self._updating.release()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`."""
        await self._each("pause", mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._each("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        await self._each("abort", request_ids)

    async def release_memory(self) -> None:
        """Lets the requests in flight end, holds later ones back, and then gives up the engines' memory."""
        await self._gate.close()
        await asyncio.gather(*self._reviving)
        self._reclaimed.clear()
        await self._each("release_memory")

    async def reclaim_memory(self) -> None:
        """Takes the memory back and lets the requests in that have waited."""
        await self._each("reclaim_memory")
        self._reclaimed.set()
        self._gate.open()

    async def rest(self, count: int) -> None:
        """Gives up the memory of the first `count` engines; their requests wait, later ones go elsewhere."""
        shared = self._members[:count]
        for member in shared:
            member.resting = True
        await asyncio.gather(*self._reviving)
        self._reclaimed.clear()
        await self._each("pause", "recompute", among=shared)
        await self._each("release_memory", among=shared)

    async def wake(self) -> None:
        """Ends `rest`: what waited goes on, its context computed anew."""
        shared = [member for member in self._members if member.resting]
        await self._each("reclaim_memory", among=shared)
        await self._each("resume", among=shared)
        self._reclaimed.set()
        for member in shared:
            member.resting = False
        async with self._changed:
            self._changed.notify_all()

    async def health(self) -> Health:
        """That of the first live engine."""
        await self._free_member()
        answers = await self._each("health")
        first: Health = answers[0][1]
        return first

    async def close(self) -> None:
        """Ends the engines."""
        self._closed = True
        for task in self._reviving:
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()
        for member in self._members:
            self._end(member.actor)

    async def _each(
        self, method: str, *arguments: Any, among: Sequence[_Member] | None = None
    ) -> list[tuple[_Member, Any]]:
        """The answers of all live engines, without those that died of the call or hang."""
        members = [member for member in (self._members if among is None else among) if member.live]

        async def one(member: _Member) -> tuple[_Member, Any] | None:
            actor = member.actor
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return member, await _answer(getattr(actor, method).remote(*arguments))
            except RayActorError as error:
                self._bury(member, actor, error)
            except TimeoutError:
                if not limit.expired():
                    raise
                self._bury(member, actor, None)
            return None

        return [answer for answer in await asyncio.gather(*map(one, members)) if answer is not None]

    async def _ask(self, member: _Member, method: str, *arguments: Any) -> Any:
        return await _answer(getattr(member.actor, method).remote(*arguments))


async def _answer(reference: Awaitable[Any]) -> Any:
    """What the call gave; the engine's own exception if it raised one."""
    try:
        return await reference
    except RayActorError:
        raise
    except RayTaskError as error:
        raise (error.cause or error) from None

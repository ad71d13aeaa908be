"""`Members`: engine processes that are watched, and started anew when they die or hang."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from relax_core.cluster.errors import ClusterError

_log = logging.getLogger(__name__)

_START_SHARE = 6
"""An engine may take so many times `timeout_s` to start: it loads a model."""

Start = Callable[[int], Any]
"""Starts the engine of a number: an actor handle of `EngineHost`."""


@dataclass
class Member:
    """One engine: the process that it has now, and what can be asked of it.

    Attributes:
        number: from 0.
        actor: its handle.
        live: it answers.
        behind: it lacks the weights that the others serve.
        reviving: somebody starts it, or brings it weights.
        resting: its memory is given up.
        restarts: since the last update.
        starts: of all.
        requests: in flight.
    """

    number: int
    actor: Any
    live: bool = True
    behind: bool = False
    reviving: bool = False
    resting: bool = False
    restarts: int = 0
    starts: int = 1
    requests: int = 0

    @property
    def awake(self) -> bool:
        """It can take requests."""
        return self.live and not self.resting and not self.behind


class Members:
    """Engines by number; all calls are made on one event loop.

    Attributes:
        all: the engines.
        reclaimed: set while there is memory for engines.
        failure: what ends the run.

    Args:
        start: starts an engine.
        count: engines.
        max_restarts: of one engine, between two updates.
        timeout_s: in which an engine must answer every call but sampling.
        end: ends the process of an engine, whatever it is doing.
        bring_up: gives an engine that is behind the weights of the others, or waits a moment where that
            cannot be had; it is live then.
    """

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        max_restarts: int,
        timeout_s: float,
        end: Callable[[Any], None],
        bring_up: Callable[[Member], Awaitable[None]],
    ) -> None:
        self._start = start
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._end = end
        self._bring_up = bring_up
        self._reviving: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._closed = False
        self.all = [Member(number, start(number)) for number in range(count)]
        self.reclaimed = asyncio.Event()
        self.reclaimed.set()
        self.failure: ClusterError | None = None

    async def open(self, sampling: Callable[[], bool]) -> list[int]:
        """Waits until every engine is ready; their process ids. From here on they are watched.

        Args:
            sampling: whether engines that are awake have their memory.
        """
        pids = [await answer_of(member.actor.pid.remote()) for member in self.all]
        self._watching = asyncio.get_running_loop().create_task(self._watch(sampling))
        return pids

    async def _watch(self, sampling: Callable[[], bool]) -> None:
        """Asks the engines that sample, again and again, for what takes their sampling thread a moment."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            if sampling():
                await self.each("abort", (), among=[member for member in self.all if member.awake])

    async def announce(self) -> None:
        """Something has changed that others may wait for."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something of the engines, or for the failure that ends the run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.failure is not None or condition())

    async def free(self) -> Member:
        """The live engine with the fewest requests; waits for one to be revived."""
        await self._until_any(lambda member: member.awake)
        awake = (member for member in self.all if member.awake)
        return min(awake, key=lambda member: (member.requests, member.number))

    async def live(self) -> None:
        """Waits for an engine that can be given weights."""
        await self._until_any(lambda member: member.live)

    async def _until_any(self, wanted: Callable[[Member], bool]) -> None:
        await self.until(lambda: any(map(wanted, self.all)))
        if self.failure is not None:
            raise self.failure

    async def each(
        self, method: str, *arguments: Any, among: Sequence[Member] | None = None
    ) -> list[tuple[Member, Any]]:
        """The answers of all live engines, without those that died of the call or hang."""
        members = [member for member in (self.all if among is None else among) if member.live]

        async def one(member: Member) -> tuple[Member, Any] | None:
            actor = member.actor
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return member, await answer_of(getattr(actor, method).remote(*arguments))
            except RayActorError as error:
                self.bury(member, actor, error)
            except TimeoutError:
                if not limit.expired():
                    raise
                self.bury(member, actor, None)
            return None

        return [answer for answer in await asyncio.gather(*map(one, members)) if answer is not None]

    async def in_time(self, call: Awaitable[Any]) -> Any:
        """What a call gave.

        Raises:
            TimeoutError: nothing, in the time that an engine has.
        """
        async with asyncio.timeout(self._timeout_s):
            return await answer_of(call)

    def bury(self, member: Member, actor: Any, error: RayActorError | None) -> None:
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
        self.see_to(member)

    def see_to(self, member: Member) -> None:
        """Has an engine started or brought up, unless somebody does already."""
        if member.reviving:
            return
        member.reviving = True
        task = asyncio.get_running_loop().create_task(self._revive(member))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, member: Member) -> None:
        """Starts an engine that is not live, and gives one that is behind the weights of the others."""
        try:
            while not member.live or member.behind:
                if member.live:
                    actor = member.actor
                    try:
                        await self._bring_up(member)
                    except RayActorError as error:
                        self.bury(member, actor, error)
                    except TimeoutError:
                        self.bury(member, actor, None)
                    continue
                member.restarts += 1
                if member.restarts > self._max_restarts:
                    raise ClusterError(
                        f"engine {member.number} died {member.restarts} times since the last update; "
                        f"cluster.max_restarts is {self._max_restarts}"
                    )
                # While the trainer has the device there is no memory for another engine.
                await self.reclaimed.wait()
                member.actor = self._start(member.number)
                member.starts += 1
                try:
                    async with asyncio.timeout(_START_SHARE * self._timeout_s):
                        await answer_of(member.actor.pid.remote())
                    member.behind = True
                    await self._bring_up(member)
                except RayActorError as error:
                    _log.warning("engine %d died while it started: %s", member.number, error)
                except TimeoutError:
                    self._end(member.actor)
                    _log.warning("engine %d did not start in time", member.number)
        except Exception as error:
            self.failure = error if isinstance(error, ClusterError) else ClusterError(str(error))
        finally:
            member.reviving = False
        await self.announce()

    async def close(self) -> None:
        """Ends the engines."""
        self._closed = True
        for task in self._reviving:
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()
        for member in self.all:
            self._end(member.actor)


async def answer_of(reference: Awaitable[Any]) -> Any:
    """What a call gave; the engine's own exception if it raised one."""
    try:
        return await reference
    except RayActorError:
        raise
    except RayTaskError as error:
        raise (error.cause or error) from None

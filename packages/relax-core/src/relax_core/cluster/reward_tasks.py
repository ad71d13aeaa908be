"""Rewards as Ray tasks, on whatever machines the cluster has."""

import asyncio
import inspect
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from relax_rollout.rewards import Reward, RewardInput
from relax_rollout.rewards.calls import as_result, resolve
from relax_rollout.rewards.process import GRACE_S, START_LIMIT_S
from relax_rollout.rewards.runner import RewardLimits
from relax_rollout.rewards.worker import error_reply, reply_of

Answer = Callable[[dict[str, Any]], None]


class TaskPool:
    """A task for each completion, at most `limits.concurrency` at a time; see `relax_rollout`'s `Pool`.

    Tasks have seats of the run's own: on a cluster that is full they would never begin, and be late. So would
    those of rewards behind slow tools, if not all of a run's pools took the same seats from one queue.
    A call that runs over its time is interrupted where Python code can be; the process of one that goes on
    regardless is ended.

    Args:
        seats: those that are free, each Ray's options of a task; of one event loop.
        reward: with a `worker`.
        limits: time and concurrency.
    """

    def __init__(self, seats: asyncio.Queue[Mapping[str, Any]], reward: Reward, limits: RewardLimits) -> None:
        assert reward.worker is not None, "this reward needs no worker"
        self._reward = reward
        self._limits = limits
        self._seats = seats
        self._may_run = asyncio.Semaphore(limits.concurrency)
        self._task = ray.remote(judge)
        self._running: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """None: Ray keeps the processes."""
        return ()

    def submit(self, item: RewardInput, answer: Answer) -> None:
        """Queues an item; called on an event loop."""
        task = asyncio.get_running_loop().create_task(self._judge(item, answer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Nothing waits any more when a run ends."""

    async def _judge(self, item: RewardInput, answer: Answer) -> None:
        async with self._may_run:
            seat = await self._seats.get()
            try:
                message = await self._judged_at(seat, item)
            finally:
                self._seats.put_nowait(seat)
        answer(message)

    async def _judged_at(self, seat: Mapping[str, Any], item: RewardInput) -> dict[str, Any]:
        limit = self._limits.timeout_s
        started = time.perf_counter()
        task = self._task.options(**seat, max_retries=0)
        call = task.remote(self._reward.worker, item, limit, self._reward.memory_gib)
        try:
            message: dict[str, Any] = await asyncio.wait_for(call, START_LIMIT_S + limit + GRACE_S)
        except TimeoutError:
            ray.cancel(call, force=True)
            return {"late": True}
        except RayError as error:
            return error_reply(error, started)
        return message


def free_seats(options: Iterable[Mapping[str, Any]]) -> asyncio.Queue[Mapping[str, Any]]:
    """What the pools of a run share.

    Args:
        options: Ray's, of each task that may run beside the others.
    """
    seats: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
    for each in options:
        seats.put_nowait(each)
    return seats


class _LateError(BaseException):
    """The call ran over its limit; no `except Exception` on the way swallows it."""


def judge(function: str, item: RewardInput, timeout_s: float, memory_gib: float | None) -> dict[str, Any]:
    """Judges one completion in this process, which Ray uses for nothing else meanwhile.

    Args:
        function: `module:function`.
        item: what to judge.
        timeout_s: after which the call is interrupted, in seconds.
        memory_gib: that the call may take beyond what the process has; None sets no limit.

    Returns:
        A message as a worker process of `relax_rollout.rewards` writes it.
    """
    try:
        call = resolve(function)
    except ValueError as error:
        return error_reply(error, time.perf_counter())
    before = signal.signal(signal.SIGALRM, _raise_late)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    started = time.perf_counter()
    try:
        if memory_gib is not None:
            bound = _address_space() + int(memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (bound, memory[1]))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        value = call(item)
        return reply_of(
            as_result(asyncio.run(_wait(value)) if inspect.isawaitable(value) else value), started
        )
    except _LateError:
        return {"late": True}
    except (Exception, SystemExit) as error:
        return error_reply(error, started)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


async def _wait(value: Any) -> Any:
    return await value


def _raise_late(*_: object) -> None:
    raise _LateError


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()

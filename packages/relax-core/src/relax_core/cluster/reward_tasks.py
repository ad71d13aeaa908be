"""Rewards as Ray tasks, on whatever machines the cluster has."""

import asyncio
import inspect
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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

    Tasks have seats of the run's own: on a cluster that is full they would never begin, and be late.
    A call that runs over its time is interrupted where Python code can be; the process of one that goes on
    regardless is ended.

    Args:
        seats: Ray's options of tasks that may run at once; more of them wait for one another.
        reward: with a `worker`.
        limits: time and concurrency.
    """

    def __init__(self, seats: Sequence[Mapping[str, Any]], reward: Reward, limits: RewardLimits) -> None:
        assert reward.worker is not None, "this reward needs no worker"
        self._reward = reward
        self._limits = limits
        task = ray.remote(judge)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for place in range(limits.concurrency):
            self._free.put_nowait(task.options(**seats[place % len(seats)], max_retries=0))
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
        task = await self._free.get()
        limit = self._limits.timeout_s
        started = time.perf_counter()
        call = task.remote(self._reward.worker, item, limit, self._reward.memory_gib)
        try:
            message = await asyncio.wait_for(call, START_LIMIT_S + limit + GRACE_S)
        except TimeoutError:
            ray.cancel(call, force=True)
            message = {"late": True}
        except RayError as error:
            message = error_reply(error, started)
        finally:
            self._free.put_nowait(task)
        answer(message)


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

"""Scoring many completions with one reward, with a time limit each; a failing reward never raises."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from relax_rollout.rewards.pool import WorkerPool
from relax_rollout.rewards.process import Answer
from relax_rollout.rewards.results import Reward, RewardInput, RewardResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """Limits of a reward.

    Args:
        timeout_s: time limit of one judgement, in seconds; the process that overruns it is ended.
        concurrency: the most judgements in progress; for a plain function also the most processes.
        fallback_score: score of a completion that could not be judged.

    Raises:
        ValueError: a limit that is not above 0, or a fallback that is not finite.
    """

    timeout_s: float = 10.0
    concurrency: int = 4
    fallback_score: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be a finite number of seconds above 0")
        if (
            isinstance(self.concurrency, bool)
            or not isinstance(self.concurrency, int)
            or self.concurrency < 1
        ):
            raise ValueError(f"concurrency is {self.concurrency!r}; it must be a whole number of at least 1")
        if not math.isfinite(self.fallback_score):
            raise ValueError(f"fallback_score is {self.fallback_score}; it must be finite")


class Pool(Protocol):
    """Where the completions are judged that need more than ``quick``."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive, where they are known."""
        ...

    def submit(self, item: RewardInput, answer: Answer) -> None:
        """Queue an item; ``answer`` is called once, with a message as a worker process writes it."""
        ...

    def close(self) -> None:
        """End what is in progress."""
        ...


class RewardRunner:
    """Runs one reward; close it when done, or use it as a context manager.

    No process is started before a completion needs one. Results keep the inputs' order. What fails (an
    exception, a return value that is no score, NaN, a call over its time limit, a crash) gives a result with
    ``error`` set and the fallback score, and is logged once per batch.

    Args:
        reward: from :func:`load_reward`.
        timeout_s: see :class:`RewardLimits`.
        concurrency: see :class:`RewardLimits`.
        fallback_score: see :class:`RewardLimits`.
        start_pool: makes the pool once it is needed; worker processes of this machine if None.

    Raises:
        ValueError: see :class:`RewardLimits`.
    """

    def __init__(
        self,
        reward: Reward,
        timeout_s: float = 10.0,
        concurrency: int = 4,
        *,
        fallback_score: float = 0.0,
        start_pool: Callable[[Reward, RewardLimits], Pool] | None = None,
    ) -> None:
        self.reward = reward
        self.limits = RewardLimits(timeout_s, concurrency, fallback_score)
        self._start_pool = start_pool or _worker_processes
        self._pool: Pool | None = None

    async def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge the items; the event loop goes on meanwhile."""
        begun = [self._begin(item) for item in items]
        waiting = [each for each in begun if isinstance(each, Future)]
        if waiting:
            await asyncio.gather(*map(asyncio.wrap_future, waiting))
        return self._collect(begun)

    def score_now(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """Judge the items and wait for it; for callers without an event loop."""
        return self._collect([self._begin(item) for item in items])

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive; empty until one was needed."""
        return () if self._pool is None else self._pool.pids

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, item: RewardInput) -> "RewardResult | Future[RewardResult]":
        started = time.perf_counter()
        try:
            result = self.reward.quick(item)
        except Exception as error:  # a failing reward is a result, never a failing run
            return self._failed(f"{type(error).__name__}: {error}", time.perf_counter() - started)
        if result is not None:
            return result
        if self._pool is None:
            self._pool = self._start_pool(self.reward, self.limits)
        future: Future[RewardResult] = Future()
        # Whoever waits may give up; the worker's answer still finds a future that takes it.
        future.set_running_or_notify_cancel()
        self._pool.submit(item, lambda message: future.set_result(self._result_of(message)))
        return future

    def _failed(self, reason: str, elapsed_s: float) -> RewardResult:
        return RewardResult(score=self.limits.fallback_score, error=reason, elapsed_s=elapsed_s)

    def _result_of(self, message: dict[str, Any]) -> RewardResult:
        elapsed_s = float(message.get("elapsed_s", 0.0))
        if message.get("late"):
            limit = self.limits.timeout_s
            return self._failed(f"over its time limit of {limit:g} s", limit)
        reason = message.get("failed", message.get("error"))
        if reason is not None:
            judged = self._failed(str(reason), elapsed_s)
        else:
            judged = RewardResult(
                score=message["score"],
                correct=message["correct"],
                extracted=message["extracted"],
                elapsed_s=elapsed_s,
            )
        return replace(judged, worker=message.get("worker"), ended_at=message.get("ended_at"))

    def _collect(self, begun: "list[RewardResult | Future[RewardResult]]") -> list[RewardResult]:
        results = [each.result() if isinstance(each, Future) else each for each in begun]
        errors = Counter(result.error for result in results if result.error is not None)
        if errors:
            (reason, count), total = errors.most_common(1)[0], sum(errors.values())
            log.warning(
                "reward %s failed on %d of %d completions, which score %g; most often (%d): %s",
                self.reward.name, total, len(results), self.limits.fallback_score, count, reason,
            )  # fmt: skip
        return results


def _worker_processes(reward: Reward, limits: RewardLimits) -> Pool:
    return WorkerPool(reward, timeout_s=limits.timeout_s, concurrency=limits.concurrency)

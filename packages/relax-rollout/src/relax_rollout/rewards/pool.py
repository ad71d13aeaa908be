"""Worker processes of one reward: started when first needed, replaced when one is ended."""

import sys
import threading
from collections import deque

from relax_rollout.rewards.calls import Setup
from relax_rollout.rewards.process import Answer, WorkerProcess
from relax_rollout.rewards.results import Reward, RewardInput


class WorkerPool:
    """Judges items in worker processes, at most ``concurrency`` at a time.

    A plain function gets a process per call in progress; a coroutine function one process for all.

    Args:
        reward: with a ``worker``.
        timeout_s: time limit of one call, from the moment its process works on it.
        concurrency: the most calls in progress.
    """

    def __init__(self, reward: Reward, *, timeout_s: float, concurrency: int) -> None:
        assert reward.worker is not None, "this reward needs no worker"
        self._setup = Setup(tuple(sys.path), reward.worker, reward.concurrent, reward.memory_gib, timeout_s)
        self._per_process = concurrency if reward.concurrent else 1
        self._max_processes = 1 if reward.concurrent else concurrency
        self._lock = threading.Lock()
        self._waiting: deque[tuple[RewardInput, Answer]] = deque()
        self._processes: list[WorkerProcess] = []
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive."""
        return tuple(process.pid for process in self._processes if process.alive)

    def submit(self, item: RewardInput, answer: Answer) -> None:
        """Queue an item; ``answer`` is called once, on some thread."""
        with self._lock:
            self._waiting.append((item, answer))
        self._dispatch()

    def close(self) -> None:
        """End the processes; calls in progress fail, and so do those that wait."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for process in self._processes:
            process.close()
        for _, answer in waiting:
            answer({"failed": "the reward runner was closed"})

    def _dispatch(self, _freed: WorkerProcess | None = None) -> None:
        while True:
            with self._lock:
                self._processes = [process for process in self._processes if process.alive]
                if not self._waiting or self._closed:
                    return
                free = [process for process in self._processes if process.load < self._per_process]
                if not free and len(self._processes) >= self._max_processes:
                    return
                if not free:
                    free = [WorkerProcess(self._setup, self._dispatch)]
                    self._processes += free
                item, answer = self._waiting.popleft()
                reserved = free[0].reserve(answer)
            free[0].send(reserved, item)

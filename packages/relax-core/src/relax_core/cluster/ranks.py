"""The trainer ranks as a whole: started together, called together, ended together."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from relax_core.cluster.errors import RankDiedError
from relax_core.cluster.rank import SLOW_SHARE, TrainerRank
from relax_core.cluster.seats import Seats
from relax_core.config.root import RelaxConfig

_log = logging.getLogger(__name__)

_GRACE_S = 20.0
"""After one rank has failed the others may take this long to notice."""

_SLOW = ("offer", "open", "load", "save", "finish_saves", "export")


class Ranks:
    """The processes of one world; the first call waits until all have met and loaded the model.

    Args:
        config: the run's.
        seats: where they run.
        threads: of torch, in each.
    """

    def __init__(self, config: RelaxConfig, seats: Seats, threads: int) -> None:
        size = config.cluster.trainer_ranks
        self._actors = [
            ray.remote(TrainerRank).options(**seats.rank(rank)).remote(config, rank, size, threads)
            for rank in range(size)
        ]
        self._timeout_s = config.cluster.rank_timeout_s
        self._pids: list[int] | None = None
        self._opening = threading.Lock()

    def pids(self) -> list[int]:
        """Process ids in the order of ranks.

        Raises:
            RankDiedError: one has ended, or hangs.
            ValueError: the checkpoint does not fit.
        """
        with self._opening:
            if self._pids is None:
                (address,) = self._settle("offer", [self._actors[0].offer.remote()])
                self._pids = self._settle("open", [actor.open.remote(*address) for actor in self._actors])
            return self._pids

    def visible_devices(self, ranks: Sequence[int], resource: str) -> list[str]:
        """Numbers of the devices that Ray gave to some ranks, which need not have met yet.

        Raises:
            RankDiedError: one has ended.
        """
        calls = [self._actors[rank].visible_devices.remote(resource) for rank in ranks]
        answers = self._settle("visible_devices", calls)
        return [device for answer in answers for device in answer]

    def call(self, method: str, *arguments: Any, first: int | None = None) -> list[Any]:
        """Every rank's answer.

        Args:
            method: of `TrainerRank`.
            arguments: the same for all.
            first: number of return values of the method; rank 0's first value then stays in shared memory
                and comes as a reference.

        Raises:
            RankDiedError: one has ended, or not answered within `cluster.rank_timeout_s`.
            Exception: what a rank raised.
        """
        self.pids()
        if first is None:
            return self._settle(method, [getattr(actor, method).remote(*arguments) for actor in self._actors])
        pairs = [
            getattr(actor, method).options(num_returns=first).remote(*arguments) for actor in self._actors
        ]
        answers = self._settle(method, [pair[1] for pair in pairs])
        return [pairs[0][0], *answers]

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)

    def _settle(self, method: str, references: Sequence[Any]) -> list[Any]:
        """Waits for all, so long as a call may take; once one has failed, only so long for the others."""
        answers: dict[Any, Any] = {}
        died: RayActorError | None = None
        failed: BaseException | None = None
        limit_s = self._timeout_s * (SLOW_SHARE if method in _SLOW else 1)
        waiting, deadline = list(references), time.monotonic() + limit_s
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                break
            try:
                answers[ready[0]] = ray.get(ready[0])
                continue
            except RayActorError as error:
                died = error
            except RayTaskError as error:
                failed = failed or error.cause or error
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if died is not None:
            raise RankDiedError(str(died).splitlines()[0]) from died
        if failed is not None:
            raise failed
        if waiting:
            silent = ", ".join(str(references.index(reference)) for reference in waiting)
            raise RankDiedError(
                f"rank {silent} did not answer {method!r} within {limit_s:g} seconds, "
                f"cluster.rank_timeout_s is {self._timeout_s:g}"
            )
        return [answers[reference] for reference in references]

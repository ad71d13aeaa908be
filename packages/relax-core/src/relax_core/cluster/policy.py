"""`RayPolicy`: the policy on trainer ranks of their own, which outlives any of them."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_rollout import RolloutEngine
from torch import Tensor

from relax_core.cluster.engines import EngineGroup
from relax_core.cluster.errors import ClusterError, EnginesLostError, RankDiedError
from relax_core.cluster.journal import Journal
from relax_core.cluster.packed_samples import PackedSamples, split
from relax_core.cluster.ranks import Ranks
from relax_core.cluster.seats import Seats
from relax_core.cluster.stream import open_stream
from relax_core.config.root import RelaxConfig
from relax_core.loop.policy import Scored, Trained
from relax_core.loop.weights import refuse_mismatch
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics

_log = logging.getLogger(__name__)


class RayPolicy:
    """A `Policy` on the ranks of a cluster.

    When a rank dies the ranks are started anew, load the last checkpoint and train once more on the
    mini-batches since then, which are kept; nothing is sampled again and nobody else notices. On a CPU they
    end with the same bits.

    Args:
        config: the run's.
        seats: where the ranks run.
        threads: of torch, in each.
    """

    def __init__(self, config: RelaxConfig, seats: Seats, threads: int) -> None:
        self._config = config
        self._seats = seats
        self._threads = threads
        self._journal = Journal()
        self._stream = open_stream(config.cluster)
        self._saves: tuple[Path, int, bool] | None = None
        self._ranks = Ranks(config, seats, threads)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return self._ranks.pids()

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, of: Scored = "policy"
    ) -> list[Tensor]:
        """See `Policy`."""
        packed = PackedSamples.pack(samples)
        with self._offered(packed) as ticket:
            return split(self._call("score", ticket, temperature, of)[0], packed.lengths)

    def step(
        self, samples: Sequence[Sample], objective: TrainingObjective, *, of: Trained = "policy"
    ) -> StepMetrics:
        """See `Policy`."""
        packed = PackedSamples.pack(samples)
        with self._offered(packed) as ticket:
            metrics: StepMetrics = self._call("step", ticket, objective, of)[0]
        self._journal.add((packed, objective, of))
        return metrics

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """See `Policy`; buckets go through the shared memory of Ray, the next while one is loaded."""
        assert isinstance(engine, EngineGroup), "engines of a cluster are updated by its own ranks"
        for attempt in range(self._config.cluster.max_restarts + 1):
            try:
                return await self._update(engine, version)
            except RankDiedError as died:
                await asyncio.to_thread(self._recover, died, attempt)
            except EnginesLostError as lost:
                _log.warning("%s: it is made again", lost)
        raise ClusterError(
            f"no update to version {version} came through in {self._config.cluster.max_restarts + 1} attempts"
        )

    async def _update(self, engine: EngineGroup, version: int) -> int:
        kept, *_ = await asyncio.to_thread(self._ranks.call, "kept_names")
        dtypes = await engine.begin_update(version, kept)
        await asyncio.to_thread(self._ranks.call, "begin_export")
        expected: dict[str, str] = {}
        if kept:
            expected, *_ = await asyncio.to_thread(self._ranks.call, "kept_digests", dtypes)
        ahead = asyncio.create_task(self._next_bucket(dtypes))
        while True:
            bucket, digests = await ahead
            if digests is None:
                break
            ahead = asyncio.create_task(self._next_bucket(dtypes))
            expected |= digests
            await engine.load_shared(bucket)
        return refuse_mismatch(await engine.end_update(), expected, version)

    async def _next_bucket(self, dtypes: Mapping[str, str]) -> tuple[Any, dict[str, str] | None]:
        bucket, digests, *_ = await asyncio.to_thread(self._ranks.call, "next_bucket", dtypes, first=2)
        return bucket, digests

    def export(self, directory: Path) -> None:
        """See `Policy`."""
        self._call("export", directory)

    def save_to(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        """See `Policy`."""
        self._saves = root, keep, asynchronous
        self._call("save_to", *self._saves)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Policy`."""
        assert self._saves is not None, "save_to comes first"
        root, _, asynchronous = self._saves
        self._call("save", step, state)
        # It returns once the checkpoint before is whole, and with it this one unless it is written behind.
        self._journal.confirm()
        self._journal.mark(root / f"step_{step}")
        if not asynchronous:
            self._journal.confirm()

    def finish_saves(self) -> None:
        """See `Policy`."""
        self._call("finish_saves")
        self._journal.confirm()

    def load(self, directory: Path) -> dict[str, Any]:
        """See `Policy`."""
        state: dict[str, Any] = self._call("load", directory)[0]
        self._journal.mark(directory)
        self._journal.confirm()
        return state

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()
        self._stream.close()
        self._journal.close()

    @contextmanager
    def _offered(self, samples: PackedSamples) -> Iterator[Any]:
        """The ticket of samples for the block."""
        ticket = self._stream.put(samples)
        yield ticket
        self._stream.drop(ticket)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for attempt in range(self._config.cluster.max_restarts + 1):
            try:
                return self._ranks.call(method, *arguments)
            except RankDiedError as died:
                self._recover(died, attempt)
        raise AssertionError("recovery raises after the last attempt")

    def _recover(self, died: RankDiedError, attempt: int) -> None:
        """New ranks in the state of the old ones before the call that failed."""
        limit = self._config.cluster.max_restarts
        if attempt == limit:
            raise ClusterError(
                f"trainer ranks died {limit + 1} times in one call, cluster.max_restarts is {limit}: {died}. "
                "The system log tells whether memory ran out; resume with --resume"
            ) from died
        base = self._journal.base
        _log.warning(
            "a trainer rank died (%s): the trainer starts again from %s and repeats %d optimizer steps",
            died, "the run's first weights" if base is None else base.name, len(self._journal),
        )  # fmt: skip
        self._journal.withdraw()
        self._ranks.close()
        self._ranks = Ranks(self._config, self._seats, self._threads)
        try:
            if base is not None:
                self._ranks.call("load", base)
            for samples, objective, of in self._journal.calls():
                with self._offered(samples) as ticket:
                    self._ranks.call("step", ticket, objective, of)
            if self._saves is not None:
                self._ranks.call("save_to", *self._saves)
        except RankDiedError as again:
            self._recover(again, attempt + 1)

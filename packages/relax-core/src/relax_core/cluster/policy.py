"""`RayPolicy`: the policy on trainer ranks of their own, which outlives any of them."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_bridge import BridgeError
from relax_rollout import RolloutEngine, SharesRefusedError, TransferError
from relax_rollout.weights.bucket import Bucket
from relax_rollout.weights.files import OwnFolder
from torch import Tensor

from relax_core.cluster.engines import EngineGroup
from relax_core.cluster.errors import ClusterError, EnginesLostError, RankDiedError, WeightsGoneError
from relax_core.cluster.journal import Journal
from relax_core.cluster.packed_samples import PackedSamples, split
from relax_core.cluster.ranks import Ranks
from relax_core.cluster.seats import Seats
from relax_core.cluster.stream import open_stream
from relax_core.cluster.weight_path import WeightPath, choose_path
from relax_core.config.root import RelaxConfig
from relax_core.device.registry import choose_device
from relax_core.loop.policy import Scored, Trained
from relax_core.loop.update_path import update_folder
from relax_core.loop.weights import refuse_mismatch
from relax_core.run.trace import ProcessSpans
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics

_log = logging.getLogger(__name__)

_WAIT_SHARE = 0.9
"""Of `cluster.engine_timeout_s`: engines that wait for a broadcast say so before they are taken to hang."""


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
        self._watched: Path | None = None
        self._ranks = Ranks(config, seats, threads)
        # The ranks of the open window.
        self._window: Ranks | None = None
        self._path: WeightPath | None = None
        self._folder: OwnFolder | None = None
        self._shared_devices: dict[int, list[str]] = {}
        self._met: list[tuple[int, int]] | None = None
        # Whether the engines serve what the ranks hold; and whoever calls the ranks outside of an update.
        self._served = False
        self._using = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return self._ranks.pids()

    def devices_of_engine(self, number: int) -> list[str] | None:
        """Numbers, on its host, of the devices that engine `number` shares; None if Ray gives it its own.

        They are the same for as long as the ranks' seats are.
        """
        ranks, resource = self._seats.device_ranks(number), self._seats.resource
        if not ranks or resource is None:
            return None
        if number not in self._shared_devices:
            self._shared_devices[number] = self._ranks.visible_devices(ranks, resource)
        return self._shared_devices[number]

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
        self._served = False
        with self._offered(packed) as ticket:
            metrics: StepMetrics = self._call("step", ticket, objective, of)[0]
        self._journal.add((packed, objective, of))
        return metrics

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """See `Policy`; a bucket is made while the one before travels."""
        assert isinstance(engine, EngineGroup), "engines of a cluster are updated by its own ranks"
        engine.again = self._again
        for attempt in range(self._config.cluster.max_restarts + 1):
            try:
                compared = await self._update(engine, version)
            except RankDiedError as died:
                engine.drop_update()
                await asyncio.to_thread(self._recover, died, attempt)
            except (EnginesLostError, TransferError) as lost:
                engine.drop_update()
                self._met = None
                _log.warning("update to version %d: %s: it is made again", version, lost)
            else:
                self._served = True
                return compared
        raise ClusterError(
            f"no update to version {version} came through in {self._config.cluster.max_restarts + 1} attempts"
        )

    async def _update(self, engine: EngineGroup, version: int) -> int:
        while True:
            try:
                return await self._update_once(engine, version)
            except SharesRefusedError as refused:
                engine.drop_update()
                assert self._path is not None, "a path was taken"
                self._path = self._path.without(refused.names, str(refused))

    async def _update_once(self, engine: EngineGroup, version: int) -> int:
        if self._path is None:
            device = choose_device(self._config.run.device)
            self._path = await choose_path(self._config, device, self._ranks, engine)
        kept = (await self._ask("kept_names"))[0]
        dtypes = await engine.begin_update(version, kept)
        if self._path.path == "store":
            expected = await self._by_store(engine, dtypes)
        else:
            expected = await self._packed(engine, dtypes, self._path)
        if kept:
            expected |= (await self._ask("kept_digests", dtypes))[0]
        return refuse_mismatch(await engine.end_update(), expected, version)

    async def _by_store(self, engine: EngineGroup, dtypes: Mapping[str, str]) -> dict[str, str]:
        await self._ask("begin_export")
        expected: dict[str, str] = {}
        ahead = asyncio.create_task(self._next_bucket(dtypes))
        while True:
            bucket, digests = await ahead
            if digests is None:
                return expected
            ahead = asyncio.create_task(self._next_bucket(dtypes))
            expected |= digests
            await engine.load_shared(bucket)

    async def _packed(
        self, engine: EngineGroup, dtypes: Mapping[str, str], path: WeightPath
    ) -> dict[str, str]:
        """Buckets that engines take from where a rank has packed them."""
        if path.path == "disk" and self._folder is None:
            folder = update_folder(self._config)
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = OwnFolder(folder)
        where = None if self._folder is None else str(self._folder.path)
        try:
            await self._ask("begin_export", path.path, where, path.engine_ranks, path.gathered)
        except BridgeError as error:
            self._path = path = path.whole(str(error))
            await self._ask("begin_export", path.path, where)
        broadcast = path.path == "broadcast"
        if broadcast and engine.updated != self._met:
            await self._meet(engine)
        packing = {rank for own in path.sources.values() for rank in own} or {0}
        sources = path.sources or {number: (0,) for number, _ in engine.updated}
        expected: dict[str, str] = {}
        ahead = asyncio.create_task(self._ask("next_packed", dtypes, packing))
        try:
            while True:
                answers = await ahead
                if answers[0] is None:
                    break
                # Whoever broadcasts has begun before it makes the next bucket, which then goes along.
                sending = [asyncio.create_task(self._ask("send"))] if broadcast else []
                ahead = asyncio.create_task(self._ask("next_packed", dtypes, packing))
                expected |= answers[min(packing)][1]
                for parts in _by_engine(sources, [answer[0] for answer in answers]):
                    await engine.load_packed(parts, broadcast=broadcast)
                await asyncio.gather(*sending)
            if broadcast:
                await self._ask("finish_sending")
        finally:
            # No rank is left in the middle of what all of them do together.
            await asyncio.gather(ahead, return_exceptions=True)
        return expected

    async def _meet(self, engine: EngineGroup) -> None:
        size = 1 + await engine.receivers()
        wait_s = _WAIT_SHARE * self._config.cluster.engine_timeout_s
        meeting = (await self._ask("offer_group", size, wait_s))[0]
        await asyncio.gather(engine.connect(meeting), self._ask("meet"))
        self._met = engine.updated

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.to_thread(self._ranks.call, method, *arguments)

    async def _again(self, version: int) -> AsyncIterator[Any]:
        """The weights that were sent last, for an engine that has lost them; see `EngineGroup`."""
        if not self._served or not self._using.acquire(blocking=False):
            raise WeightsGoneError(f"the trainer is busy, or has others than those of version {version}")
        try:
            await self._ask("begin_export")
            while True:
                bucket, digests = await self._next_bucket({})
                if digests is None:
                    return
                yield bucket
        except RankDiedError as died:
            # The loop may be waiting for this engine: nobody else would see to the ranks.
            await asyncio.to_thread(self._recover, died, 0)
            raise WeightsGoneError(str(died)) from died
        finally:
            self._using.release()

    async def _next_bucket(self, dtypes: Mapping[str, str]) -> tuple[Any, dict[str, str] | None]:
        ranks = self._ranks
        bucket, digests, *_ = await asyncio.to_thread(ranks.call, "next_bucket", dtypes, first=2)
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
        self._served = False
        state: dict[str, Any] = self._call("load", directory)[0]
        self._journal.mark(directory)
        self._journal.confirm()
        return state

    def chip(self) -> str:
        """See `Policy`."""
        return str(self._call("chip")[0])

    def watch(self, folder: Path) -> None:
        """See `Policy`."""
        self._watched = folder
        self._call("watch", folder)

    def begin_window(self, step: int) -> None:
        """See `Policy`; ranks that start anew within the window are not watched in it."""
        self._window = self._ranks
        self._call("begin_window", step)

    def end_window(self) -> None:
        """See `Policy`."""
        if self._window is self._ranks:
            self._call("end_window")

    def spans(self) -> Sequence[ProcessSpans]:
        """See `Policy`."""
        return self._call("spans")

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()
        if self._folder is not None:
            self._folder.close()
        self._stream.close()
        self._journal.close()

    @contextmanager
    def _offered(self, samples: PackedSamples) -> Iterator[Any]:
        """The ticket of samples for the block."""
        ticket = self._stream.put(samples)
        yield ticket
        self._stream.drop(ticket)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        with self._using:
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
                f"trainer ranks died or hung {limit + 1} times in one call, cluster.max_restarts is {limit}: "
                f"{died}. The system log tells whether memory ran out; resume with --resume"
            ) from died
        base = self._journal.base
        _log.warning(
            "a trainer rank died or hangs (%s): the trainer starts again from %s and repeats %d optimizer "
            "steps",
            died, "the run's first weights" if base is None else base.name, len(self._journal),
        )  # fmt: skip
        self._journal.withdraw()
        self._ranks.close()
        # Devices may have changed places among the ranks.
        self._path = self._met = None
        self._ranks = Ranks(self._config, self._seats, self._threads)
        try:
            if base is not None:
                self._ranks.call("load", base)
            for samples, objective, of in self._journal.calls():
                with self._offered(samples) as ticket:
                    self._ranks.call("step", ticket, objective, of)
            if self._saves is not None:
                self._ranks.call("save_to", *self._saves)
            if self._watched is not None:
                self._ranks.call("watch", self._watched)
        except RankDiedError as again:
            self._recover(again, attempt + 1)


def _by_engine(
    sources: Mapping[int, Sequence[int]], packed: Sequence[Sequence[Bucket]]
) -> Iterator[dict[int, list[Bucket]]]:
    """One bucket of every rank after the other, for each engine those of its ranks.

    Args:
        sources: by engine, its ranks.
        packed: by rank, what it packed; ranks of one engine packed alike.
    """
    count = max(len(buckets) for buckets in packed)
    for place in range(count):
        yield {n: [packed[rank][place] for rank in own] for n, own in sources.items()}

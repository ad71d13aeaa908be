"""The embedded engine: a transformers model in this process, sampled by one thread."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

from relax_rollout.engine import EngineStateError, Health, WeightUpdateError
from relax_rollout.engines.checks import check_requests
from relax_rollout.engines.transformers.config import TransformersConfig
from relax_rollout.engines.transformers.load import load_model
from relax_rollout.engines.transformers.pictures import patch_of
from relax_rollout.engines.transformers.row import Row
from relax_rollout.engines.transformers.scheduler import Scheduler
from relax_rollout.engines.transformers.weights import WeightUpdate
from relax_rollout.requests import Completion, PauseMode, Request

log = logging.getLogger(__name__)
R = TypeVar("R")


class _Call:
    """The rows of one generate call; its future is done when all have ended or one has failed."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.done: Future[list[Completion]] = Future()
        self.rows = [Row(request, self._row_ended) for request in requests]
        self._open = len(self.rows)

    def _row_ended(self, row: Row) -> None:
        self._open -= 1
        if row.error is not None:
            if not self.done.done():
                self.done.set_exception(row.error)
            for other in self.rows:
                other.end("abort")
        elif self._open == 0 and not self.done.done():
            self.done.set_result([row.completion() for row in self.rows])


class TransformersEngine:
    """:class:`relax_rollout.RolloutEngine` on a model of the transformers library in this process.

    What is guaranteed about randomness: the uniform number behind a token depends only on the request's seed
    and the token's place, so a request's tokens depend only on weights, prompt, sampling settings and seed,
    up to floating
    point: the sums of a matrix product may round differently in a batch of another size, which moves
        log-probs by
    about 1e-6 in float32 and can change a token when its draw falls that close to a boundary. The same calls
    in the same order, one at a time, give the same bits on the same machine.

    Args:
        config: where the model is and how it runs.

    Raises:
        ValueError: the checkpoint is not complete or has layers that the engine cannot cache.
    """

    def __init__(self, config: TransformersConfig) -> None:
        self.config = config
        self._model = load_model(config)
        text = self._model.config.get_text_config(decoder=True)
        self._vocabulary: int = text.vocab_size
        self._max_context: int = text.max_position_embeddings
        self._patch = patch_of(self._model) if config.pictures else None
        self._parameters = sum(p.numel() for p in self._model.parameters())
        self._dtype = str(self._model.dtype).removeprefix("torch.")
        self._update: WeightUpdate | None = None
        self._unused = 0
        self._in_flight: set[str] = set()
        self._scheduler = Scheduler(self._model, config)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See :meth:`relax_rollout.RolloutEngine.generate`."""
        if self._scheduler.released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before generate")
        if not requests:
            return []
        self._check(requests)
        call = _Call(requests)
        ids = [request.id for request in requests]
        self._in_flight.update(ids)
        try:
            await self._on_thread(lambda: self._scheduler.submit(call.rows))
            return await asyncio.wrap_future(call.done)
        except asyncio.CancelledError:
            self._scheduler.call(lambda: self._scheduler.abort(frozenset(ids)))
            raise
        finally:
            self._in_flight.difference_update(ids)

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(
            requests,
            self._in_flight,
            vocabulary=self._vocabulary,
            context=self._max_context,
            patch=self._patch,
        )

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.begin_update`."""
        return await self._on_thread(lambda: self._begin(version, kept))

    def _begin(self, version: int, kept: Collection[str]) -> dict[str, str]:
        if self._scheduler.released:
            raise EngineStateError("the engine's memory is released; call reclaim_memory before an update")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version is {version!r}; it must be a whole number of at least 0")
        if self._update is not None:
            log.warning("the update to version %d was never ended and is dropped", self._update.version)
        self._update = WeightUpdate(self._model, version, kept)
        return self._update.dtypes()

    async def load(self, bucket: Mapping[str, Tensor]) -> None:
        """See :meth:`relax_rollout.RolloutEngine.load`."""
        await self._on_thread(lambda: self._open_update(lambda update: update.add(bucket)))

    async def end_update(self) -> Mapping[str, str]:
        """See :meth:`relax_rollout.RolloutEngine.end_update`."""
        return await self._on_thread(lambda: self._open_update(self._commit))

    def _open_update(self, action: Callable[[WeightUpdate], R]) -> R:
        if self._update is None:
            raise EngineStateError("no update is open; call begin_update first (a refused update is dropped)")
        try:
            return action(self._update)
        except WeightUpdateError:
            self._update = None
            raise

    def _commit(self, update: WeightUpdate) -> dict[str, str]:
        update.check_complete()
        digests = self._scheduler.commit(update)
        self._unused = len(update.unused)
        self._update = None
        return digests

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See :meth:`relax_rollout.RolloutEngine.pause`."""
        await self._on_thread(lambda: self._scheduler.pause(mode))

    async def resume(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.resume`."""
        await self._on_thread(self._scheduler.resume)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See :meth:`relax_rollout.RolloutEngine.abort`."""
        ids = None if request_ids is None else frozenset(request_ids)
        await self._on_thread(lambda: self._scheduler.abort(ids))

    async def release_memory(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.release_memory`."""
        await self._on_thread(self._scheduler.release)

    async def reclaim_memory(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.reclaim_memory`."""
        await self._on_thread(self._scheduler.reclaim)

    async def health(self) -> Health:
        """See :meth:`relax_rollout.RolloutEngine.health`."""
        scheduler, update = self._scheduler, self._update
        return Health(
            ready=not (scheduler.closed or scheduler.released),
            version=scheduler.version,
            running=scheduler.running,
            waiting=len(scheduler.waiting),
            paused=scheduler.paused,
            released=scheduler.released,
            updating=None if update is None else update.version,
            device=str(self._model.device),
            dtype=self._dtype,
            parameters=self._parameters,
            unused_tensors=self._unused,
            last_error=scheduler.last_error,
        )

    async def close(self) -> None:
        """See :meth:`relax_rollout.RolloutEngine.close`."""
        await asyncio.to_thread(self._scheduler.close)

    async def _on_thread(self, function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._scheduler.call(function))


def create(**options: Any) -> TransformersEngine:
    """Entry point: an engine from the fields of :class:`TransformersConfig`.

    Raises:
        ValueError: an option that is no field, or a value that the config or the checkpoint refuses.
    """
    known = [field.name for field in fields(TransformersConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"the transformers engine has no option {', '.join(unknown)}; it has {', '.join(known)}"
        )
    return TransformersEngine(TransformersConfig(**options))

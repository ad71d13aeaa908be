"""The one thread that owns the model: it runs calls between steps, and steps while there is work."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from relax_rollout.engine import EngineStateError
from relax_rollout.engines.transformers.batch import Batch
from relax_rollout.engines.transformers.config import TransformersConfig
from relax_rollout.engines.transformers.load import layer_types_of
from relax_rollout.engines.transformers.row import Row
from relax_rollout.engines.transformers.weights import WeightUpdate
from relax_rollout.requests import PauseMode

log = logging.getLogger(__name__)
R = TypeVar("R")

COMPACT_AT = 0.25
"""Share of ended rows from which on it pays to rebuild the cache without them."""


class Scheduler:
    """Draws tokens for all rows submitted, with continuous batching.

    Waiting rows join when there is room for an eighth of a full batch, or nothing is in flight. All state
    belongs to the scheduler's thread: :meth:`call` runs a function there between two steps; the other public
    methods, except :meth:`close`, are such functions. Attributes may be read from anywhere.

    Args:
        model: loaded model.
        config: its settings.
    """

    def __init__(self, model: PreTrainedModel, config: TransformersConfig) -> None:
        self.model = model
        self.version = config.version
        self.paused = False
        self.released = False
        self.closed = False
        self.last_error: str | None = None
        self.waiting: deque[Row] = deque()
        self._config = config
        self._layer_types = layer_types_of(model)
        self._batch: Batch | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="relax-rollout-transformers", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Rows in flight."""
        batch = self._batch
        return 0 if batch is None else batch.live

    def call(self, function: Callable[[], R]) -> "Future[R]":
        """Run a function on the thread.

        Raises:
            EngineStateError: closed.
        """
        future: Future[R] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # handed to the caller, who waits on the future
                    future.set_exception(error)

        with self._close_lock:
            if self.closed:
                raise EngineStateError("the engine is closed; create another one")
            self._calls.put(task)
        return future

    def close(self) -> None:
        """End the thread after the present step; rows in flight fail. Blocks until it has ended."""

        def fail_all() -> None:
            for row in self._all_rows():
                row.fail(EngineStateError("the engine was closed while the request was in flight"))
            self._batch = None
            self.waiting.clear()

        with self._close_lock:
            if not self.closed:
                self._calls.put(fail_all)
                self.closed = True
        self._thread.join()

    def submit(self, rows: Sequence[Row]) -> None:
        """Add rows to the queue."""
        self.waiting.extend(rows)

    def abort(self, request_ids: frozenset[str] | None) -> None:
        """End these rows, or all."""
        for row in self._all_rows():
            if request_ids is None or row.request.id in request_ids:
                row.end("abort")
        self.waiting = deque(row for row in self.waiting if row.finish is None)

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "recompute":
            self._requeue()

    def resume(self) -> None:
        """Go on drawing."""
        self.paused = False

    def commit(self, update: WeightUpdate) -> dict[str, str]:
        """Let an update serve; rows in flight go back to the head of the queue and are recomputed."""
        digests = update.commit()
        self._requeue()
        self.version = update.version
        return digests

    def release(self) -> None:
        """Drop the caches and, on an accelerator, move the weights to the host.

        Raises:
            EngineStateError: rows are in flight and the engine is not paused.
        """
        if not self.paused and (self.running or self.waiting):
            raise EngineStateError(
                f"{self.running} requests are running and {len(self.waiting)} waiting; wait for them, abort "
                "or pause before the memory is released"
            )
        self._requeue()
        self.released = True
        if torch.device(self._config.device).type != "cpu":
            with torch.inference_mode(False):
                self.model.to("cpu")
            torch.accelerator.empty_cache()

    def reclaim(self) -> None:
        """Undo :meth:`release`."""
        with torch.inference_mode(False):
            self.model.to(self._config.device)
        self.released = False

    def _all_rows(self) -> list[Row]:
        return [*(self._batch.rows if self._batch else ()), *self.waiting]

    def _requeue(self) -> None:
        if self._batch is not None:
            self.waiting.extendleft(row for row in reversed(self._batch.rows) if row.finish is None)
            self._batch = None

    def _run(self) -> None:
        with torch.inference_mode():
            while not (self.closed and self._calls.empty()):
                busy = bool(self._batch or self.waiting) and not (self.paused or self.released or self.closed)
                try:
                    self._calls.get(block=not busy)()
                except queue.Empty:
                    self._step_or_fail()

    def _step_or_fail(self) -> None:
        try:
            self._step()
        except Exception as error:  # handed to the callers, who wait on the rows
            log.exception("sampling failed; the requests in flight fail with this error")
            self.last_error = f"{type(error).__name__}: {error}"
            failed = self._all_rows()
            self._batch = None
            self.waiting.clear()
            for row in failed:
                row.fail(error)

    def _step(self) -> None:
        self._admit()
        if self._batch is None:
            return
        token_N = self._batch.draw(self.version)
        live = self._batch.live
        if live == 0:
            self._batch = None
            return
        if live <= (1 - COMPACT_AT) * len(self._batch.rows):
            token_N = self._batch.keep_live(token_N)
        self._batch.advance(self.model, token_N)

    def _admit(self) -> None:
        room = self._config.max_rows - (self._batch.live if self._batch else 0)
        if not self.waiting or (self._batch is not None and room < max(1, self._config.max_rows // 8)):
            return
        rows = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        fresh: Batch | None = None
        try:
            fresh = Batch.prefill(
                self.model, self._layer_types, rows, max_tokens=self._config.max_prefill_tokens
            )
        finally:
            if fresh is None:
                self.waiting.extendleft(reversed(rows))
        if self._batch is None:
            self._batch = fresh
        else:
            self._batch.merge(fresh)

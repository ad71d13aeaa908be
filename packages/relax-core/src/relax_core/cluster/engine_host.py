"""An engine in a process of its own."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from relax_rollout import Completion, Health, PackedLoading, PauseMode, Request, create_engine
from relax_rollout.weights.broadcast import Meeting
from relax_rollout.weights.bucket import Bucket
from relax_rollout.weights.unpacker import Unpacker

from relax_core.cluster.process import host_name, prepare_process, process_ready, show_devices
from relax_core.cluster.shared_tensors import Packed, unpack
from relax_core.config.root import RelaxConfig
from relax_core.loop.rollout import engine_options
from relax_core.run.trace import ProcessSpans, SpanLog, keeping_spans, span


class EngineHost:
    """A `RolloutEngine` behind calls; see there.

    Args:
        config: the run's.
        model: Hugging Face directory that it starts from.
        device: where it samples, such as "cuda:0".
        threads: of torch on a CPU.
        visible: numbers of the devices that it samples on, where they are not those that Ray gave it.
        number: of this engine.
    """

    _log: SpanLog

    def __init__(
        self,
        config: RelaxConfig,
        model: Path,
        device: str,
        threads: int,
        visible: Sequence[str] | None = None,
        number: int = 0,
    ) -> None:
        if visible is not None:
            show_devices(device.partition(":")[0], visible)
        prepare_process(config, threads)
        self._engine = create_engine(config.rollout.engine, **engine_options(config, model, device))
        engine = self._engine
        # An engine of this process is given what was packed elsewhere as tensors; servers open it themselves.
        self._packed: PackedLoading = (
            engine if isinstance(engine, PackedLoading) else Unpacker(engine, torch.device(device))
        )
        self._stack = ExitStack()
        if config.run.trace:
            self._log = self._stack.enter_context(keeping_spans(f"engine {number}"))
        process_ready()

    async def spans(self) -> ProcessSpans:
        """What this engine did since it was asked last; the run has a timeline."""
        return self._log.take()

    async def pid(self) -> int:
        """This process's id; answers once the engine is ready."""
        return os.getpid()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        with span("generate", "sampling", requests=len(requests)) as shown:
            completions = await self._engine.generate(requests)
            shown["tokens"] = sum(len(completion.token_ids) for completion in completions)
        return completions

    async def begin_update(self, version: int, kept: Collection[str] = ()) -> Mapping[str, str]:
        """See `RolloutEngine.begin_update`."""
        with span("begin", "weight update", version=version):
            return await self._engine.begin_update(version, kept)

    async def load(self, bucket: Packed) -> None:
        """See `RolloutEngine.load`."""
        with span("load", "weight update"):
            await self._engine.load(unpack(bucket))

    async def host(self) -> str:
        """The host that this process is on."""
        return host_name()

    async def receivers(self) -> int:
        """See `PackedLoading.receivers`."""
        return self._packed.receivers

    async def sees(self, handles: Sequence[str]) -> bool:
        """See `PackedLoading.sees`."""
        return await self._packed.sees(handles)

    async def connect(self, meeting: Meeting, first_rank: int) -> None:
        """See `PackedLoading.connect`."""
        await self._packed.connect(meeting, first_rank)

    async def load_packed(self, parts: Sequence[Bucket]) -> None:
        """See `PackedLoading.load_packed`."""
        with span("load", "weight update"):
            await self._packed.load_packed(parts)

    async def end_update(self) -> Mapping[str, str]:
        """See `RolloutEngine.end_update`."""
        with span("end", "weight update"):
            return await self._engine.end_update()

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._engine.resume()

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """See `RolloutEngine.abort`."""
        await self._engine.abort(request_ids)

    async def release_memory(self) -> None:
        """See `RolloutEngine.release_memory`."""
        with span("release", "memory"):
            await self._engine.release_memory()

    async def reclaim_memory(self) -> None:
        """See `RolloutEngine.reclaim_memory`."""
        with span("reclaim", "memory"):
            await self._engine.reclaim_memory()

    async def health(self) -> Health:
        """See `RolloutEngine.health`."""
        return replace(await self._engine.health())

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await self._engine.close()

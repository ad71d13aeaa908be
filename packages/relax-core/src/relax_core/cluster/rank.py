"""A trainer rank in a process of its own: a `LocalPolicy` behind calls."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from relax_rollout import tensor_digest
from relax_rollout.weights.broadcast import Meeting
from relax_rollout.weights.bucket import Bucket, Share
from relax_rollout.weights.packing import Packing
from relax_rollout.weights.probe import MemoryProbe
from relax_rollout.weights.sender import SendingPath, WeightSender
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from relax_core.cluster.process import host_name, prepare_process, process_ready
from relax_core.cluster.shared_tensors import Packed, pack
from relax_core.cluster.stream import SampleStream, open_stream
from relax_core.config.root import RelaxConfig
from relax_core.loop.policy import Scored, Trained
from relax_core.loop.weights import BUCKET_BYTES, buckets
from relax_core.run.trace import ProcessSpans, keeping_spans
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics

_MEETING = timedelta(minutes=10)

SLOW_SHARE = 6
"""Starting, loading, saving and exporting may take so many times `cluster.rank_timeout_s`."""


class TrainerRank:
    """One of the processes that train a model together; every call is made on all of them at once.

    Args:
        config: the run's.
        rank: of this process.
        size: of the world.
        threads: of torch on a CPU.
    """

    def __init__(self, config: RelaxConfig, rank: int, size: int, threads: int) -> None:
        prepare_process(config, threads)
        self._config = config
        self._rank = rank
        self._size = size
        self._stack = ExitStack()
        self._store: Any = None
        self._stream: SampleStream | None = None
        self._weights: Callable[[], Iterator[Mapping[str, Tensor]]]
        self._export: Iterator[Mapping[str, Tensor]] | None = None
        self._sender: WeightSender | None = None
        self._packing: Packing | None = None
        self._packings: dict[tuple[Any, ...], Packing] = {}

    def visible_devices(self, resource: str) -> list[str]:
        """Numbers, on this host, of the devices that Ray gave to this rank."""
        given = ray.get_runtime_context().get_accelerator_ids()
        return [str(number) for number in given.get(resource, [])]

    def offer(self) -> tuple[str, int]:
        """Opens the store where the ranks meet; its host and port. Asked of rank 0."""
        host: str = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def open(self, host: str, port: int) -> int:
        """Meets the other ranks and loads the model; this process's id.

        Raises:
            ValueError: the checkpoint does not fit.
        """
        from relax_core.loop.checkpoints import open_model
        from relax_core.loop.local import open_policy

        if self._store is None:
            self._store = TCPStore(host, port, is_master=False, timeout=_MEETING)
        # Ray shows each process its own device alone.
        place = {"RANK": self._rank, "WORLD_SIZE": self._size, "LOCAL_RANK": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        # Of a rank that hangs the driver hears first: what a collective raises would end the run.
        patience = timedelta(seconds=(SLOW_SHARE + 1) * self._config.cluster.rank_timeout_s)
        opened = open_policy(self._config, *open_model(self._config), store=self._store, timeout=patience)
        self._policy = self._stack.enter_context(opened)
        process_ready()
        if self._config.run.trace:
            self._log = self._stack.enter_context(keeping_spans(f"rank {self._rank}"))
        return os.getpid()

    def _samples(self, ticket: Any) -> list[Sample]:
        # Opened late: the driver opens its end first.
        self._stream = self._stream or open_stream(self._config.cluster)
        return self._stream.take(ticket).unpack()

    def score(self, ticket: Any, temperature: float, of: Scored) -> NDArray[np.float32] | None:
        """See `Policy.score`: [T] of all samples back to back; None except on rank 0."""
        scores = self._policy.score(self._samples(ticket), temperature=temperature, of=of)
        return torch.cat(scores).numpy() if self._rank == 0 else None

    def step(self, ticket: Any, objective: TrainingObjective, of: Trained) -> StepMetrics:
        """See `Policy.step`."""
        return self._policy.step(self._samples(ticket), objective, of=of)

    def kept_names(self) -> tuple[str, ...]:
        """See `KeptWeights`."""
        return self._policy.kept.names

    def kept_digests(self, dtypes: Mapping[str, str]) -> dict[str, str]:
        """See `KeptWeights`; empty on all ranks but the first."""
        return self._policy.kept.digests(dtypes) if self._rank == 0 else {}

    def host(self) -> str:
        """The host that this process is on."""
        return host_name()

    def offer_memory(self) -> str:
        """What an engine needs to see whether it can open this rank's memory."""
        self._probe = MemoryProbe(self._policy.world.torch_device)
        return self._probe.handle

    def withdraw_memory(self) -> None:
        """Ends `offer_memory`."""
        self._probe.close()

    def begin_export(
        self,
        path: SendingPath | Literal["ipc"] | None = None,
        folder: str | None = None,
        engine_ranks: int | None = None,
        gathered: Collection[str] = (),
    ) -> None:
        """From here on the present weights are given, which must not change until the last one.

        Args:
            path: by which `next_packed` packs them; None if they go through Ray, by `next_bucket`.
            folder: of the path disk.
            engine_ranks: of an engine that cuts tensors as the trainer does: each of its ranks is given the
                share of one rank here, and nothing is gathered. None gives whole tensors.
            gathered: names of tensors that such an engine wants whole all the same.

        Raises:
            BridgeError: the engine cuts them otherwise.
        """
        self._shares: dict[str, Share] = {}
        if engine_ranks is None:
            self._weights = lambda: buckets(self._policy.changing_tensors(), BUCKET_BYTES)
        else:
            self._weights = partial(self._own_shares, engine_ranks, gathered)
        self._export = self._weights()
        self._packing = self._packing_for(engine_ranks, tuple(gathered)) if path == "ipc" else None
        if path in ("broadcast", "disk"):
            self._sender = self._sender or WeightSender(path, folder=folder)
            self._sender.begin()

    def _packing_for(self, engine_ranks: int | None, gathered: tuple[str, ...]) -> Packing:
        # A packing that is recorded does not ask for the weights, nor wait for them.
        self._policy.settle()
        key = engine_ranks, gathered, self._policy.places
        if key not in self._packings:
            for other in self._packings.values():
                other.close()
            self._packings.clear()
            device = self._policy.world.torch_device
            # Shares are all merged with their adapters at once, which a record would keep room for.
            alone = not gathered and not self._config.lora.rank
            self._packings[key] = Packing(
                device,
                lent=self._policy.own_memory() if device.type != "cpu" else (),
                recorded=self._policy.holds_all if engine_ranks is None else alone,
            )
        return self._packings[key]

    def _own_shares(self, engine_ranks: int, gathered: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of this rank's shares, of the same tensors on every rank."""
        shares = self._policy.changing_shares(engine_ranks, gathered)

        def grouped() -> Iterator[Mapping[str, Tensor]]:
            bucket: dict[str, Tensor] = {}
            size = 0
            for share in shares:
                whole = prod(share.shape) * share.tensor.element_size()
                if bucket and size + whole > BUCKET_BYTES:
                    yield bucket
                    bucket, size = {}, 0
                if share.tensor.shape != share.shape:
                    ranges = tuple((one.start, one.size) for one in share.ranges)
                    self._shares[share.name] = Share(share.axis, ranges, tuple(share.shape))
                bucket[share.name] = share.tensor
                size += whole
            if bucket:
                yield bucket

        return grouped()

    def next_packed(
        self, dtypes: Mapping[str, str], sources: Collection[int]
    ) -> tuple[list[Bucket], dict[str, str]] | None:
        """Some more weights where this rank packed them, and their digests as an engine should give them.

        Args:
            dtypes: of the engine's weights, by name.
            sources: the ranks that pack; others take part only.

        Returns:
            None after the last bucket.
        """
        if self._packing is not None:
            return self._pack_all(self._packing, dtypes, sources)
        bucket = self._next()
        if bucket is None:
            return None
        if self._rank not in sources:
            return [], {}
        assert self._sender is not None, "begin_export comes first"
        return _with_digests([self._sender.pack(bucket, dtypes)], dtypes)

    def _pack_all(
        self, packing: Packing, dtypes: Mapping[str, str], sources: Collection[int]
    ) -> tuple[list[Bucket], dict[str, str]] | None:
        """All weights at once, as they stay where they are: nothing travels while others are made."""
        if self._export is None:
            return None
        self._export = None
        if self._rank in sources:
            return _with_digests(packing(self._weights, dtypes, self._shares), dtypes)
        for _ in self._weights():
            pass
        return [], {}

    def _next(self) -> Mapping[str, Tensor] | None:
        assert self._export is not None, "begin_export comes first"
        return next(self._export, None)

    def offer_group(self, size: int, wait_s: float) -> Meeting | None:
        """Where a group for broadcasts comes together; None except on rank 0."""
        if self._rank != 0:
            return None
        assert self._sender is not None, "begin_export comes first"
        host: str = ray.util.get_node_ip_address()
        backend = {"cpu": "gloo", "npu": "hccl"}.get(self._policy.world.device.name, "nccl")
        return self._sender.offer(host, size, backend, wait_s)

    def meet(self) -> None:
        """Waits for that group.

        Raises:
            TransferError: the others did not come.
        """
        if self._rank == 0:
            assert self._sender is not None, "begin_export comes first"
            self._sender.meet(self._policy.world.torch_device)

    def send(self) -> None:
        """Begins to broadcast what was packed last.

        Raises:
            TransferError: an engine is gone.
        """
        if self._rank == 0:
            assert self._sender is not None, "begin_export comes first"
            self._sender.send()

    def finish_sending(self) -> None:
        """Waits for the broadcasts.

        Raises:
            TransferError: see `send`.
        """
        if self._rank == 0 and self._sender is not None:
            self._sender.finish()

    def next_bucket(self, dtypes: Mapping[str, str]) -> tuple[Packed | None, dict[str, str] | None]:
        """Some more weights by their Hugging Face names, and their digests as an engine should give them.

        Args:
            dtypes: of the engine's weights, by name.

        Returns:
            two times None after the last bucket, and on all ranks but the first.
        """
        bucket = self._next()
        if bucket is None or self._rank != 0:
            return None, None
        digests = {
            name: tensor_digest(tensor.to(getattr(torch, dtypes[name])))
            for name, tensor in bucket.items()
            if name in dtypes
        }
        return pack(bucket), digests

    def export(self, directory: Path) -> None:
        """See `Policy.export`."""
        self._policy.export(directory)

    def save_to(self, root: Path, keep: int, asynchronous: bool) -> None:
        """See `Policy.save_to`."""
        self._policy.save_to(root, keep=keep, asynchronous=asynchronous)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Policy.save`."""
        self._policy.save(step, state)

    def finish_saves(self) -> None:
        """See `Policy.finish_saves`."""
        self._policy.finish_saves()

    def load(self, directory: Path) -> dict[str, Any]:
        """See `Policy.load`."""
        return self._policy.load(directory)

    def chip(self) -> str:
        """See `Policy.chip`."""
        return self._policy.chip()

    def watch(self, folder: Path) -> None:
        """See `Policy.watch`."""
        self._policy.watch(folder)

    def begin_window(self, step: int) -> None:
        """See `Policy.begin_window`."""
        self._policy.begin_window(step)

    def end_window(self) -> None:
        """See `Policy.end_window`."""
        self._policy.end_window()

    def spans(self) -> ProcessSpans:
        """What this rank did since it was asked last; the run has a timeline."""
        return self._log.take()

    def close(self) -> None:
        """Leaves the other ranks."""
        self._stack.close()


def _with_digests(packed: list[Bucket], dtypes: Mapping[str, str]) -> tuple[list[Bucket], dict[str, str]]:
    entries = (entry for bucket in packed for entry in bucket.entries)
    return packed, {e.name: e.digest for e in entries if e.name in dtypes and e.digest is not None}

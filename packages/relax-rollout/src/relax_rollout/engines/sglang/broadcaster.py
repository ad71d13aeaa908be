"""Buckets to all servers by a collective."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from relax_rollout.digest import tensor_digests
from relax_rollout.engine import EngineError, TransferError
from relax_rollout.engines.sglang.config import SglangConfig
from relax_rollout.engines.sglang.server import Server
from relax_rollout.engines.sglang.update import DamagedBucketError, Update, together
from relax_rollout.weights.broadcast import BroadcastGroup, Meeting
from relax_rollout.weights.bucket import Bucket, Entry, pack, plan, views

ASK_FIRST_S = 0.3


class Broadcaster:
    """The sender's end of the group; made anew whenever a server is another process than before.

    Args:
        config: of the engine.
    """

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._group: BroadcastGroup | None = None
        self._boots: list[str | None] = []

    async def connect(self, servers: Sequence[Server]) -> None:
        """Join the group with all servers, if it is not there already.

        Raises:
            TransferError: they did not come together in time.
        """
        boots = [server.boot for server in servers]
        if self._group is not None and boots == self._boots:
            return
        config = self._config
        size = 1 + config.tensor_parallel * len(servers)
        name = f"relax-{secrets.token_hex(4)}"
        self._group = group = BroadcastGroup(
            (config.host, 0), 0, size, config.collective, config.call_timeout_s, name
        )
        meeting = Meeting(config.host, group.port, size, config.collective, config.call_timeout_s, name)
        calls = [
            asyncio.create_task(connect(server, meeting, 1 + place * config.tensor_parallel))
            for place, server in enumerate(servers)
        ]
        # Joining may hold Python's lock until all have come: the others are asked before.
        await asyncio.sleep(ASK_FIRST_S)
        try:
            await together([asyncio.to_thread(group.join), *calls])
        except RuntimeError as error:
            self._group = None
            raise TransferError(f"the group for weights did not come together: {error}") from error
        self._boots = boots

    def pack(self, update: Update, tensors: Mapping[str, Tensor]) -> tuple[list[Entry], Tensor]:
        """A bucket in memory of the collective's device; the tensors may change afterwards."""
        device = next(iter(tensors.values())).device
        if self._config.collective == "gloo":
            device = torch.device("cpu")
        sent = tensor_digests(tensors)
        entries, nbytes = plan(tensors, sent)
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        pack(tensors, entries, buffer)
        update.keep(dict(zip(sent, views(entries, buffer), strict=True)), sent)
        return entries, buffer

    async def send(
        self, servers: Sequence[Server], update: Update, packed: tuple[list[Entry], Tensor]
    ) -> None:
        """Send one bucket of :meth:`pack`.

        Raises:
            DamagedBucketError: a server received other bytes.
            TransferError: a server was lost; the update is to be sent again.
        """
        assert self._group is not None
        group, place = self._group, len(update.buckets)
        entries, buffer = packed
        update.buckets.append((Bucket(tuple(entries), buffer.numel()),))
        message = update.message(place)
        calls = [asyncio.create_task(server.control("receive", **message)) for server in servers]
        sent = asyncio.create_task(asyncio.to_thread(group.broadcast, buffer))
        try:
            _, *answers = await together([sent, *calls])
        except (RuntimeError, EngineError) as error:
            self._group = None
            raise TransferError(
                f"bucket {place} did not reach every server: {error}; send the update again"
            ) from error
        for server, answer in zip(servers, answers, strict=True):
            if wrong := answer["damaged"]:
                raise DamagedBucketError(
                    f"{server.name} received other bytes than were sent for {', '.join(wrong[:8])}"
                )


async def connect(server: Server, meeting: Meeting, first_rank: int) -> None:
    """Have the processes of a server join a group; where they cannot, the others stop waiting for them."""
    try:
        await server.control("connect", meeting=asdict(meeting), first_rank=first_rank)
    except EngineError:
        await asyncio.to_thread(meeting.give_up)
        raise

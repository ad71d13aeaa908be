"""The sending side of an update: checked, packed into buckets, received by every server, committed by all."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_rollout.digest import tensor_digests
from relax_rollout.engine import TransferError
from relax_rollout.engines.sglang.server import Server
from relax_rollout.update_check import Served, UpdateCheck
from relax_rollout.weights.bucket import Bucket, pack, plan, torch_dtype, views
from relax_rollout.weights.files import BucketFiles
from relax_rollout.weights.ipc import IpcSender

log = logging.getLogger(__name__)


class DamagedBucketError(TransferError):
    """What a server received is not what was sent, also when it was sent again."""


class LostUpdateError(TransferError):
    """A server was restarted in the middle of an update that travels by broadcast; send it again."""


def served_weights(server: Server) -> tuple[dict[str, Served], set[str]]:
    """The weights that a server serves with, and the names of its checkpoint that it does not use."""
    manifest: Mapping[str, Sequence[Any]] = server.description["manifest"]
    served, unused = {}, set()
    for name, (dtype, shape, _) in manifest.items():
        if dtype:
            served[name] = Served(tuple(shape), torch_dtype(dtype), name)
        else:
            unused.add(name)
    embedding = next((name for name in served if name.endswith("embed_tokens.weight")), None)
    if embedding is not None and "lm_head.weight" not in manifest:
        # The head is the embedding: it may come along under its own name.
        tied = served[embedding]
        served["lm_head.weight"] = Served(tied.shape, tied.dtype, embedding)
    return served, unused


class Update:
    """One update from begin to end; its buckets stay until :meth:`close`, so that a server can be caught up.

    Args:
        version: that it will serve as.
        check: of its names.
        replay: see :class:`relax_rollout.engines.sglang.config.SglangConfig`.

    Attributes:
        files: where its buckets are, or None.
        ipc: what gives out its buckets as memory, or None. Without either they travel by broadcast, or were
            packed elsewhere.
        elsewhere: its buckets are another process's, which may change them once another update has begun.
    """

    def __init__(self, version: int, check: UpdateCheck, *, replay: bool = True) -> None:
        self.id = f"{version}-{secrets.token_hex(4)}"
        self.version = version
        self.check = check
        self.files: BucketFiles | None = None
        self.ipc: IpcSender | None = None
        self.elsewhere = False
        self.replay = replay
        self.buckets: list[tuple[Bucket, ...]] = []
        self.expected: dict[str, str] = {}
        self._others: list[dict[str, str]] = []
        self._staged: dict[str, Tensor | str] = {}

    def accept(self, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a bucket that go to the servers, by the servers' names.

        Raises:
            WeightUpdateError: see :class:`relax_rollout.update_check.UpdateCheck`.
        """
        wanted = {}
        for given, tensor in bucket.items():
            name = self.check.accept(given, tensor)
            if name is None:
                continue
            if self.check.is_alias(name):
                # The servers have it under its other name; here it is compared with that.
                self._staged[name] = tensor.detach().clone()
            else:
                wanted[name] = tensor
        return wanted

    def accept_packed(self, parts: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """What of a packed bucket goes to the servers, by the servers' names.

        Its tensors have been cast to the dtypes in which they are served, so that what is sent is expected.

        Raises:
            WeightUpdateError: see :class:`relax_rollout.update_check.UpdateCheck`.
        """
        renamed = {}
        for entry in parts[0].entries:
            like = torch.empty(entry.whole, dtype=torch_dtype(entry.dtype), device="meta")
            name = self.check.accept(entry.name, like)
            if name is None:
                continue
            assert entry.digest is not None, "packed tensors come with digests"
            self._staged[name] = entry.digest
            if not self.check.is_alias(name):
                renamed[entry.name] = name
                self.expected[name] = entry.digest
        for rank, part in enumerate(parts[1:]):
            if rank == len(self._others):
                self._others.append({})
            self._others[rank] |= {renamed[e.name]: str(e.digest) for e in part.entries if e.name in renamed}
        return tuple(part.only(renamed.keys(), renamed) for part in parts)

    def keep(self, tensors: Mapping[str, Tensor], sent: Mapping[str, str]) -> None:
        """Note the digests that the servers should have, and what is needed to compare tied names.

        Args:
            tensors: that were sent, as they stay until the update ends.
            sent: their digests.
        """
        served = self.check.dtypes()
        dtypes = {name: torch_dtype(served[name]) for name in tensors}
        cast = {name: t.to(dtypes[name]) for name, t in tensors.items() if t.dtype != dtypes[name]}
        self.expected |= dict(sent) | tensor_digests(cast)
        for name, tensor in tensors.items():
            tied = name.endswith("embed_tokens.weight")
            self._staged[name] = tensor if tied else tensor.new_empty(0)

    def check_complete(self) -> None:
        """See :class:`relax_rollout.update_check.UpdateCheck`."""
        self.check.check_complete(self._staged)

    def pack(self, tensors: Mapping[str, Tensor]) -> list[Bucket]:
        """Write tensors into a file, or give them out as device memory.

        Tensors in a file may change afterwards; device memory that was lent stays as it is until the end.
        """
        sent = tensor_digests(tensors)
        if self.ipc is not None:
            self.keep(tensors, sent)
            return self.ipc.buckets(tensors, sent)
        assert self.files is not None
        entries, nbytes = plan(tensors, sent)
        path, buffer = self.files.create(nbytes)
        pack(tensors, entries, buffer)
        self.keep(dict(zip((e.name for e in entries), views(entries, buffer), strict=True)), sent)
        return [Bucket(tuple(entries), nbytes, file=path)]

    async def begin_at(self, server: Server) -> None:
        """Open it at a server."""
        await server.control("begin", update=self.id, version=self.version)

    async def send_to(self, server: Server, place: int, resend: int) -> None:
        """Have a server read a bucket, again if it arrives damaged.

        Raises:
            DamagedBucketError: it arrived damaged ``resend`` times more.
        """
        for _ in range(resend + 1):
            wrong: list[str] = (await server.control("receive", **self.message(place)))["damaged"]
            if not wrong:
                return
            log.warning("%s received other bytes of %s than were sent", server.name, ", ".join(wrong[:4]))
        raise DamagedBucketError(
            f"{server.name} received other bytes than were sent, {resend + 1} times: {', '.join(wrong[:8])}"
        )

    @property
    def lasts(self) -> bool:
        """Whether its buckets are there after its end too."""
        return (self.ipc is None or self.ipc.lasts) and all(
            part.lasts for parts in self.buckets for part in parts
        )

    def message(self, place: int) -> dict[str, Any]:
        """The fields of a "receive" call."""
        parts = [part.to_json() for part in self.buckets[place]]
        return {"update": self.id, "bucket": place, "parts": parts}

    async def catch_up(self, server: Server, resend: int) -> None:
        """Give a server that has lost it everything sent so far."""
        if not all(part.lasts for parts in self.buckets for part in parts):
            raise LostUpdateError(
                f"{server.name} was restarted during the update to version {self.version}; send it again"
            )
        await self.begin_at(server)
        for place in range(len(self.buckets)):
            await self.send_to(server, place, resend)

    async def commit_at(self, server: Server) -> dict[str, Any]:
        """Make it serve at a server, which must be paused; the answer is the same when it is asked again."""
        return await server.control(
            "commit",
            update=self.id,
            buckets=len(self.buckets),
            expected=[self.expected_of(server, digests) for digests in (self.expected, *self._others)],
            kept=list(self.check.kept),
            replay=self.replay,
        )

    def expected_of(self, server: Server, digests: Mapping[str, str] | None = None) -> dict[str, str]:
        """The digests that a server should have: it may have been started without a draft since.

        Args:
            server: of which its first rank answers.
            digests: those of another rank.
        """
        held = server.description["manifest"]
        expected = {**self.expected, **(digests or {})}
        return {name: digest for name, digest in expected.items() if held[name][0]}

    def close(self) -> None:
        """Drop the buckets."""
        if self.files is not None:
            self.files.close()
        if self.ipc is not None:
            self.ipc.release()


def faults_of(expected: Mapping[str, str], result: Mapping[str, Any]) -> list[str]:
    """What is wrong with the weights that a server serves after a commit."""
    served = result["digests"]
    wrong = [name for name, digest in expected.items() if served.get(name) != digest]
    # Texts are cut: a stale cache, of which there are few, is named before the weights.
    return [*(f"derived {name}" for name in result["stale"]), *(f"weight {name}" for name in wrong)]


async def together(calls: Sequence[Any]) -> list[Any]:
    """Run calls at once; all have ended when this returns or raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

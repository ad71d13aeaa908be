"""The sending side of an update: checked, packed into buckets, received by every server, committed by all."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from relax_rollout.digest import tensor_digests
from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.server import Server
from relax_rollout.update_check import Served, UpdateCheck
from relax_rollout.weights.bucket import Entry, pack, plan, torch_dtype, views
from relax_rollout.weights.files import BucketFiles
from relax_rollout.weights.ipc import IpcSender

log = logging.getLogger(__name__)


class DamagedBucketError(EngineError):
    """What a server received is not what was sent, also when it was sent again."""


class LostUpdateError(EngineError):
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that was sent.

    Args:
        entries: what is where in it.
        file: where it is, or None.
        handle: of the device memory where it is, or None. Without either it travelled by broadcast.
    """

    entries: tuple[Entry, ...]
    file: str | None = None
    handle: str | None = None

    def message(self, update: str, place: int) -> dict[str, Any]:
        """The fields of a "receive" call."""
        fields: dict[str, Any] = {
            "update": update,
            "bucket": place,
            "entries": [entry.to_json() for entry in self.entries],
        }
        where = {"file": self.file, "handle": self.handle}
        return fields | {name: value for name, value in where.items() if value is not None}


class Update:
    """One update from begin to end; its buckets stay until :meth:`close`, so that a server can be caught up.

    Args:
        version: that it will serve as.
        check: of its names.
        files: where its buckets are, or None.
        ipc: what gives out its buckets as device memory, or None. Without either they travel by broadcast.
        replay: see :class:`relax_rollout.engines.sglang.config.SglangConfig`.
    """

    def __init__(
        self,
        version: int,
        check: UpdateCheck,
        files: BucketFiles | None,
        ipc: IpcSender | None = None,
        *,
        replay: bool = False,
    ) -> None:
        self.id = f"{version}-{secrets.token_hex(4)}"
        self.version = version
        self.check = check
        self.files = files
        self.ipc = ipc
        self.replay = replay
        self.buckets: list[Bucket] = []
        self.expected: dict[str, str] = {}
        self._staged: dict[str, Tensor] = {}

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
            return [Bucket(tuple(entries), handle=h) for entries, h in self.ipc.buckets(tensors, sent)]
        assert self.files is not None
        entries, nbytes = plan(tensors, sent)
        path, buffer = self.files.create(nbytes)
        pack(tensors, entries, buffer)
        self.keep(dict(zip((e.name for e in entries), views(entries, buffer), strict=True)), sent)
        return [Bucket(tuple(entries), file=path)]

    async def begin_at(self, server: Server) -> None:
        """Open it at a server."""
        await server.control("begin", update=self.id, version=self.version)

    async def send_to(self, server: Server, place: int, resend: int) -> None:
        """Send a bucket's file to a server, again if it arrives damaged.

        Raises:
            DamagedBucketError: it arrived damaged ``resend`` times more.
        """
        bucket = self.buckets[place]
        for _ in range(resend + 1):
            answer = await server.control("receive", **bucket.message(self.id, place))
            wrong = wrong_names(bucket.entries, answer["received"])
            if not wrong:
                return
            log.warning("%s received other bytes of %s than were sent", server.name, ", ".join(wrong[:4]))
        raise DamagedBucketError(
            f"{server.name} received other bytes than were sent, {resend + 1} times: {', '.join(wrong[:8])}"
        )

    async def catch_up(self, server: Server, resend: int) -> None:
        """Give a server that has lost it everything sent so far."""
        if self.buckets and self.files is None and self.ipc is None:
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
            expected=self.expected_of(server),
            kept=list(self.check.kept),
            replay=self.replay,
        )

    def expected_of(self, server: Server) -> dict[str, str]:
        """The digests that a server should have: it may have been started without a draft since."""
        held = server.description["manifest"]
        return {name: digest for name, digest in self.expected.items() if held[name][0]}

    def close(self) -> None:
        """Drop the buckets."""
        if self.files is not None:
            self.files.close()
        if self.ipc is not None:
            self.ipc.release()


def wrong_names(entries: Sequence[Entry], received: Mapping[str, str]) -> list[str]:
    """Names whose digest at the receiver is not the sender's."""
    return [entry.name for entry in entries if received.get(entry.name) != entry.digest]


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

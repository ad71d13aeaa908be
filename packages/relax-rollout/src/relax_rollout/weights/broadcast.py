"""The path by collective broadcast: one sender, any number of engine processes, gloo, NCCL or HCCL.

The group is one of its own: it needs no default process group and is given up and made anew as a whole.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from relax_rollout.weights.bucket import Entry, bucket_bytes, pack

dist: Any = torch.distributed

_log = logging.getLogger(__name__)

_GIVEN_UP = "given up"
_LOOK_S = 0.02
_TOLD_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the processes of a group come together.

    Args:
        host, port: of the sender's store.
        size: number of processes, the sender among them.
        backend: "gloo", "nccl" or "hccl".
        wait_s: seconds after which a broadcast that others do not join fails.
        name: of the group; a group made anew has another one.
    """

    host: str
    port: int
    size: int
    backend: str
    wait_s: float
    name: str

    def join(self, rank: int) -> "BroadcastGroup":
        """Take part as a receiver.

        Raises:
            RuntimeError: the others did not come in time.
        """
        address = self.host, self.port
        group = BroadcastGroup(address, rank, self.size, self.backend, self.wait_s, self.name)
        group.join()
        return group

    def give_up(self) -> None:
        """Somebody will not come: whoever waits in `join` is told so."""
        try:
            tcp = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=_TOLD_S))
            dist.PrefixStore(self.name, tcp).set(_GIVEN_UP, "")
        except RuntimeError as error:
            _log.info("nobody is left to be told that a group will not meet: %s", error)


class BroadcastGroup:
    """A group of processes in which rank 0 sends buckets.

    Args:
        address: host and port of the sender's store, which rank 0 opens.
        rank: of this process; the sender is 0.
        size: number of processes.
        backend: "gloo", "nccl" or "hccl".
        timeout_s: seconds after which a broadcast that others do not join fails.
        name: of the group; a group made anew has another one.
    """

    def __init__(
        self, address: tuple[str, int], rank: int, size: int, backend: str, timeout_s: float, name: str
    ) -> None:
        self.rank = rank
        host, port = address
        timeout = timedelta(seconds=timeout_s)
        tcp = dist.TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
        self.port: int = tcp.port
        self._store = dist.PrefixStore(name, tcp)
        self._size, self._backend, self._timeout = size, backend, timeout
        self._group: Any = None

    def join(self) -> None:
        """Wait for the others.

        Raises:
            RuntimeError: they did not come in time, or one of them will not.
        """
        # What connects the processes cannot be called off, so they come together here first.
        self._store.set(_here(self.rank), "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([_here(rank) for rank in range(self._size)]):
            if self._store.check([_GIVEN_UP]):
                raise RuntimeError("one of the processes has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all {self._size} processes came within {self._timeout}")
            time.sleep(_LOOK_S)
        self._group = _group(self._store, self.rank, self._size, self._backend, self._timeout)

    def start(self, tensor: Tensor) -> Any:
        """Begin a broadcast from rank 0 to all, in place; broadcasts end in the order in which they began.

        Returns:
            its ``wait()`` raises RuntimeError if somebody did not join in time or has ended. On a device it
            returns at once, and what is queued there afterwards comes after the broadcast.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([tensor], options)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all, in place; returns when it is done here.

        Raises:
            RuntimeError: somebody did not join in time, or has ended.
        """
        self.start(tensor).wait()
        if tensor.device.type != "cpu":
            torch.accelerator.current_stream(tensor.device).synchronize()


def _here(rank: int) -> str:
    return f"here {rank}"


def _group(store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if backend == "hccl":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        return ProcessGroupHCCL(store, rank, size, options)
    raise ValueError(f"no collective backend is called {backend!r}; there are gloo, nccl and hccl")


class BroadcastSource:
    """A bucket that the sender broadcasts next."""

    stays = False

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """See :class:`relax_rollout.weights.receiver.Source`; on a device it may still be on its way."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._group.start(buffer).wait()
        return buffer


class BroadcastSender:
    """Sends buckets one behind the other: the next is packed while the last ones travel.

    Args:
        group: of which this process is rank 0.
        device: of the buckets.
        depth: buckets in memory at once.
    """

    def __init__(self, group: BroadcastGroup, device: torch.device, depth: int = 2) -> None:
        self._group, self._device, self._depth = group, device, depth
        self._slots: list[Tensor] = []
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensors: Mapping[str, Tensor], entries: Sequence[Entry]) -> None:
        """Pack a bucket and begin to send it; the tensors may change once this returns.

        Raises:
            RuntimeError: see :meth:`BroadcastGroup.start`, of this bucket or of one before.
        """
        nbytes = bucket_bytes(entries)
        buffer = self._slot(nbytes)
        pack(tensors, entries, buffer)
        part = buffer[:nbytes]
        self._sent.append((buffer, self._group.start(part)))

    def finish(self) -> None:
        """Wait for all of them."""
        while self._sent:
            self._take_back()
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()

    def _take_back(self) -> None:
        buffer, work = self._sent.popleft()
        work.wait()
        self._slots.append(buffer)

    def _slot(self, nbytes: int) -> Tensor:
        while len(self._sent) >= self._depth:
            self._take_back()
        fitting = next((n for n, slot in enumerate(self._slots) if slot.numel() >= nbytes), None)
        if fitting is not None:
            return self._slots.pop(fitting)
        self._slots.clear()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

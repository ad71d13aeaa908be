"""The path by collective broadcast: one sender, any number of engine processes, gloo, NCCL or HCCL.

The group is one of its own: it needs no default process group and is given up and made anew as a whole.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed


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
            RuntimeError: they did not come in time.
        """
        self._group = _group(self._store, self.rank, self._size, self._backend, self._timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all, in place; returns when it is done here.

        Raises:
            RuntimeError: somebody did not join in time, or has ended.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        if tensor.device.type != "cpu":
            torch.accelerator.current_stream(tensor.device).synchronize()


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

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """See :class:`relax_rollout.weights.receiver.Source`."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._group.broadcast(buffer)
        return buffer

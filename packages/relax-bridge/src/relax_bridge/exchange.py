"""How ranks give one another their bytes during an export.

An export plans on every rank what every other rank will send, so an exchange needs no headers: each rank
passes its bytes and the sizes of all, and goes on; the bytes are waited for when they are needed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Received = Sequence[Tensor] | None


class Exchange(Protocol):
    """Starts to move bytes between the ranks of a layout; ranks call it in step."""

    def receives(self, rank: int) -> bool:
        """Whether a rank gets the bytes of the others (and so exports)."""
        ...

    def start(self, mine: Tensor, sizes: Sequence[int]) -> Callable[[], Received]:
        """Starts one exchange.

        Args:
            mine: uint8 [sizes[own rank]].
            sizes: the bytes of every rank, in rank order.

        Returns:
            A function that waits and gives the bytes of every rank, uint8 [sizes[rank]] each; None on a rank
            that does not receive.
        """
        ...


class ProcessGroupExchange:
    """An exchange over a torch.distributed process group whose ranks are those of the layout, in order.

    Args:
        group: the group; None is the default one.
        to: the rank of the group that receives; None is all of them.
    """

    def __init__(self, group: Any = None, *, to: int | None = None) -> None:
        self.group = group
        self.to = to
        self._rank = dist.get_rank(group)

    def receives(self, rank: int) -> bool:
        """Whether `rank` is the one that receives, or all do."""
        return self.to is None or rank == self.to

    def start(self, mine: Tensor, sizes: Sequence[int]) -> Callable[[], Received]:
        """Point-to-point messages to the one, or a broadcast from each rank that has something."""
        mine = mine.contiguous()
        got = [
            mine if rank == self._rank else mine.new_empty(size if self.receives(self._rank) else 0)
            for rank, size in enumerate(sizes)
        ]
        works = self._broadcasts(got, sizes) if self.to is None else self._messages(got, sizes)

        def wait() -> Received:
            for work in works:
                work.wait()
            return got if self.receives(self._rank) else None

        return wait

    def _broadcasts(self, got: list[Tensor], sizes: Sequence[int]) -> list[Any]:
        return [
            dist.broadcast(got[rank], group=self.group, group_src=rank, async_op=True)
            for rank, size in enumerate(sizes)
            if size
        ]

    def _messages(self, got: list[Tensor], sizes: Sequence[int]) -> list[Any]:
        assert self.to is not None
        if self._rank != self.to:
            ops = [dist.P2POp(dist.isend, got[self._rank], group=self.group, group_peer=self.to)]
            ops = ops if sizes[self._rank] else []
        else:
            ops = [
                dist.P2POp(dist.irecv, got[rank], group=self.group, group_peer=rank)
                for rank, size in enumerate(sizes)
                if size and rank != self.to
            ]
        works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
        return works


class NoExchange:
    """The exchange of a layout of one rank."""

    def receives(self, rank: int) -> bool:
        """Always."""
        return True

    def start(self, mine: Tensor, sizes: Sequence[int]) -> Callable[[], Received]:
        """Nothing to move."""
        return lambda: [torch.empty(0, dtype=torch.uint8)]

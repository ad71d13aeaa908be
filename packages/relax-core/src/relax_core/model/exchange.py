"""Tokens travel to the ranks that hold their experts, and back.

Axes: E experts of the whole model, X experts of this rank, P rows of this rank's tokens, R rows that this
rank's experts receive, D hidden, J ranks of the exchange, G places: J / G ranks that hold the same experts.

J = expert-parallel ranks x expert-tensor ranks, the latter fastest. Each holds tokens of its own. A row goes
to every expert-tensor rank of its expert's place, whose results are partial sums that its sender adds up:
one all-to-all there and one back, for any two sizes.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from relax_kernels import Permutation, permute_tokens, sort_by_expert

from relax_core.device.readback import Readback


class ExchangeSizes:
    """The sizes of an exchange on their way to the host: one small all-gather.

    An all-to-all takes its sizes from the host, which has to wait for them; they are exact, where buffers of
    fixed sizes would drop rows or have room for all rows of all ranks. What is queued between making this and
    `read` keeps the device busy while the host waits.

    Args:
        count_E: this rank's rows of each expert, int64.
        group: the J ranks.
        copies: expert-tensor ranks.
    """

    def __init__(self, count_E: torch.Tensor, group: Any, *, copies: int) -> None:
        self._group, self._copies = group, copies
        count = count_E.new_empty(group.size() * len(count_E))
        dist.all_gather_into_tensor(count, count_E, group=group)
        count_JGX = count.view(group.size(), group.size() // copies, -1)
        self._count_JX = count_JGX[:, group.rank() // copies]
        self._arriving = Readback(count_JGX.sum(2))

    def read(self) -> "Exchange":
        """Waits for the sizes, and for nothing that was queued after them."""
        group, copies, count_JX = self._group, self._copies, self._count_JX
        rows_JG = self._arriving.read()[0].tolist()
        size, local = count_JX.shape
        sent = [rows_JG[group.rank()][to // copies] for to in range(size)]
        received = [rows[group.rank() // copies] for rows in rows_JG]
        expert_X = torch.arange(local, device=count_JX.device).repeat(size)
        expert_R = expert_X.repeat_interleave(count_JX.flatten(), output_size=sum(received))
        by_expert = sort_by_expert(expert_R.unsqueeze(1), experts=local)
        return Exchange(group, copies, sent, received, by_expert)


@dataclass(frozen=True)
class Exchange:
    """How many rows go where in one layer and micro-batch.

    Attributes:
        group: the J ranks.
        copies: expert-tensor ranks, each of which gets every row.
        sent: rows to each of the J ranks.
        received: rows from each of the J ranks.
        by_expert: sorts the received rows by expert.
    """

    group: Any
    copies: int
    sent: list[int]
    received: list[int]
    by_expert: Permutation

    @property
    def count_X(self) -> torch.Tensor:
        """Rows that each expert of this rank received, int64."""
        return self.by_expert.count_E

    def dispatch(self, x_PD: torch.Tensor) -> torch.Tensor:
        """This rank's rows, sorted by expert -> the rows of this rank's experts [R, D], sorted by expert."""
        chunks = torch.split(x_PD, self.sent[:: self.copies])
        sent = torch.cat([chunk for chunk in chunks for _ in range(self.copies)]) if self.copies > 1 else x_PD
        return permute_tokens(all_to_all(self.group, sent, self.received, self.sent), self.by_expert)

    def combine(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Results of this rank's experts -> results for this rank's rows [P, D], in the order they had."""
        back = Permutation(
            self.by_expert.token_P.unsqueeze(1), self.by_expert.row_TK.squeeze(1), self.by_expert.count_E
        )
        y_PD = all_to_all(self.group, permute_tokens(y_RD, back), self.sent, self.received)
        if self.copies == 1:
            return cast(torch.Tensor, y_PD)
        parts = torch.split(y_PD, self.sent)
        places = range(0, len(parts), self.copies)
        return torch.cat([torch.stack(parts[at : at + self.copies]).sum(0) for at in places])

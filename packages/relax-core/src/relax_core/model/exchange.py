"""Tokens travel to the ranks that hold their experts, and back.

Axes: E experts of the whole model, X experts of this rank, P rows of this rank's tokens, R rows that this
rank's experts receive, D hidden, J ranks of the exchange.

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

    @classmethod
    def plan(cls, count_E: torch.Tensor, group: Any, *, copies: int) -> "Exchange":
        """Agrees on sizes: one small all-gather, and the one wait for the device that sizes need.

        Args:
            count_E: this rank's rows of each expert, int64.
            group: the J ranks.
            copies: expert-tensor ranks.
        """
        size, rank, experts = group.size(), group.rank(), len(count_E)
        places = size // copies
        local = experts // places
        count = count_E.new_empty(size * experts)
        dist.all_gather_into_tensor(count, count_E, group=group)
        count = count.view(size, places, local)
        count_JX = count[:, rank // copies]
        rows_JP = count.sum(2).tolist()
        sent = [rows_JP[rank][to // copies] for to in range(size)]
        received = [rows[rank // copies] for rows in rows_JP]
        expert_X = torch.arange(local, device=count_E.device).repeat(size)
        expert_R = expert_X.repeat_interleave(count_JX.flatten(), output_size=sum(received))
        by_expert = sort_by_expert(expert_R.unsqueeze(1), experts=local)
        return cls(group, copies, sent, received, by_expert)

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

"""The largest entries of a vocabulary from those of its parts; backends share this.

T tokens, K entries kept, M candidates of one or more parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def largest(value_TM: torch.Tensor, index_TM: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest candidates (all, if there are fewer) and their indices, largest first."""
    value_TK, place_TK = torch.topk(value_TM, min(k, value_TM.shape[1]))
    return value_TK, index_TM.gather(1, place_TK)


def largest_over_ranks(
    value_TM: torch.Tensor, index_TM: torch.Tensor, k: int, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of all ranks' candidates, of which each rank has equally many; same on each."""
    values = [torch.empty_like(value_TM) for _ in range(group.size())]
    indices = [torch.empty_like(index_TM) for _ in range(group.size())]
    dist.all_gather(values, value_TM.contiguous(), group=group)
    dist.all_gather(indices, index_TM.contiguous(), group=group)
    return largest(torch.cat(values, 1), torch.cat(indices, 1), k)

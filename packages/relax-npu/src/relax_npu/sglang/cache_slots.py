"""Cache slots of drafted tokens without the kernel that writes 16 of them into rows that are shorter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from relax_npu.upstream.fix import replace


def slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Returns int32 [batch * drafts]: for each request the slots of its places from start to end.

    sgl-kernel-npu's `cache_loc_update` copies 16 slots a row whatever the row's length, past the end of this
    result. Here each row has its own length.
    """
    place = start_offset.view(-1, 1) + torch.arange(draft_token_num, device=req_to_token.device)
    # Indexed by row and place: a row is as long as the longest context.
    row = req_pool_indices.long().view(-1, 1)
    found = req_to_token[row, place.clamp(max=req_to_token.shape[1] - 1)]
    return found.where(place < end_offset.view(-1, 1), 0).flatten().to(torch.int32)


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.speculative.triton_ops.cache_locs`."""
    replace(module, "assign_extend_cache_locs_func", slots)

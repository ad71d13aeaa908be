"""What the log-probabilities of trained and of fixed heads share: slices, exact products, ranks put together.

T tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Logits of one slice at once: 6 bytes each in the backward pass, 0.75 GiB in all.
LOGITS_AT_ONCE = 1 << 27
MIN_SLICE = 1024
STEP = 4096


def slices_of(tokens: int, vocabulary: int, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Return (first, entries) of slices of almost equal width, multiples of 256 where there are several.

    `chunk_tokens` asks for no more logits at once than that many tokens have.
    """
    at_once = LOGITS_AT_ONCE if chunk_tokens is None else chunk_tokens * vocabulary
    widest = max(MIN_SLICE, at_once // max(tokens, 1))
    count = -(-vocabulary // widest)
    width = -(-vocabulary // (count * 256)) * 256
    return [(first, min(width, vocabulary - first)) for first in range(0, vocabulary, width)]


def float32_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """Write a @ b into a float32 `out`, or add it, without rounding to the inputs' dtype in between."""
    if not a.is_cuda:
        product = a.float() @ b.float()
        out.copy_(product + out if accumulate else product)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def over_ranks(
    group: ProcessGroup,
    top_T: torch.Tensor,
    total_T: torch.Tensor,
    chosen_T: torch.Tensor,
    weighted_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine each rank's part of the softmax; a rank that does not hold the target has 0 for its logit."""
    highest_T = top_T.clone()
    dist.all_reduce(highest_T, op=dist.ReduceOp.MAX, group=group)
    gap_T = top_T - highest_T
    factor_T = gap_T.exp()
    sums_3T = torch.stack((total_T * factor_T, chosen_T, (weighted_T + gap_T * total_T) * factor_T))
    dist.all_reduce(sums_3T, group=group)
    return highest_T, sums_3T[0], sums_3T[1], sums_3T[2]

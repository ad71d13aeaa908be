"""The sums of :mod:`relax_rollout.digest_sums` in one launch and one pass, by Triton.

Sums modulo 2**64 are the same in any order, so that blocks add theirs up as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relax_rollout.digest_sums import COLUMNS, GAMMA, MIX

ROWS = 64
"""Of a block, 1 MiB."""


def jit(function: Callable[..., Any]) -> Any:
    """Triton's compiler, with a type."""
    return triton.jit(function)


@jit
def odd(place: tl.tensor, GAMMA: tl.constexpr, MIX: tl.constexpr) -> tl.tensor:
    """See `_odd` of :mod:`relax_rollout.digest_sums`."""
    x = (place.to(tl.int64) + 1) * GAMMA
    return ((x ^ (x >> 30)) * MIX) | 1


@jit
def add_sums(
    sums_B3: tl.tensor,
    address_N: tl.tensor,
    rows_N: tl.tensor,
    first_N: tl.tensor,
    table_N: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GAMMA: tl.constexpr,
    MIX: tl.constexpr,
) -> None:
    """One of N blocks: `rows` rows of a table, from its row `first`, at an address."""
    block = tl.program_id(0)
    word = tl.load(address_N + block).to(tl.pointer_type(tl.int64))
    rows, first = tl.load(rows_N + block), tl.load(first_N + block)
    place_C = tl.arange(0, COLUMNS)
    column_C = tl.zeros((COLUMNS,), tl.int64)
    row_C = tl.zeros((COLUMNS,), tl.int64)
    upper_C = tl.zeros((COLUMNS,), tl.int64)
    for row in range(ROWS):
        there = place_C < tl.where(row < rows, COLUMNS, 0)
        word_C = tl.load(word + row * COLUMNS + place_C, mask=there, other=0)
        weight = odd(first + row, GAMMA, MIX)
        column_C += word_C
        row_C += weight * word_C
        upper_C += weight * (word_C >> 32)
    sums = sums_B3 + 3 * tl.load(table_N + block)
    tl.atomic_add(sums, tl.sum(column_C * odd(place_C, GAMMA, MIX), 0))
    tl.atomic_add(sums + 1, tl.sum(row_C, 0))
    tl.atomic_add(sums + 2, tl.sum(upper_C, 0))


class KernelSums:
    """See :func:`relax_rollout.digest_sums.sums_of`."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = tables
        device = tables[0].device
        rows_B = torch.tensor([len(table_RC) for table_RC in tables])
        blocks_B = -(-rows_B // ROWS)
        table_N = torch.repeat_interleave(torch.arange(len(tables)), blocks_B)
        block_N = torch.arange(len(table_N)) - (blocks_B.cumsum(0) - blocks_B)[table_N]
        first_N = ROWS * block_N
        address_B = torch.tensor([table_RC.data_ptr() for table_RC in tables])
        address_N = address_B[table_N] + 8 * COLUMNS * first_N
        listed = torch.stack([address_N, (rows_B[table_N] - first_N).clamp(max=ROWS), first_N, table_N])
        self._blocks = listed.to(device).unbind()
        self._sums_B3 = torch.empty(len(tables), 3, dtype=torch.int64, device=device)

    def __call__(self) -> Tensor:
        """Int64 [B, 3], until the next call."""
        self._sums_B3.zero_()
        grid = (len(self._blocks[0]),)
        # Triton launches on the current device.
        with torch.cuda.device(self._sums_B3.device) if self._sums_B3.is_cuda else nullcontext():
            add_sums[grid](
                self._sums_B3, *self._blocks, COLUMNS=COLUMNS, ROWS=ROWS, GAMMA=GAMMA, MIX=MIX, num_warps=8
            )
        return self._sums_B3

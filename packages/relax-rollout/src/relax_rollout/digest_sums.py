"""The sums that stand for a large tensor's bytes, of many tensors at once.

B tensors read as tables, R rows of C words of 8 bytes.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

log = logging.getLogger(__name__)

COLUMNS = 2048
PART_BYTES = {"cpu": 2**20}
"""Of a table worked on at once: what a cache holds; on other devices 64 MiB."""
GAMMA, MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def sums_of(tables: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Reads tables as they are at each call.

    Args:
        tables: int64 [R, C] of one device, contiguous.

    Returns:
        gives int64 [B, 3]: of each the weighted sums of its columns, its rows, and its rows' upper halves.
    """
    if tables and tables[0].is_cuda and _has_triton():
        from relax_rollout.digest_kernel import KernelSums

        return KernelSums(tables)
    return lambda: torch.stack([_sums(table_RC) for table_RC in tables])


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    found = find_spec("triton") is not None
    if not found:
        log.warning("Triton is not installed: digests of weights take some passes over them in place of one")
    return found


def _sums(table_RC: Tensor) -> Tensor:
    column_C = torch.zeros(COLUMNS, dtype=torch.int64, device=table_RC.device)
    row_R, upper_R = [], []
    for part_RC in torch.split(table_RC, PART_BYTES.get(table_RC.device.type, 2**26) // (8 * COLUMNS)):
        column_C += part_RC.sum(0)
        row_R.append(part_RC.sum(1))
        # A sum modulo 2**64 loses an even number of changes of the highest bit.
        upper_R.append((part_RC >> 32).sum(1))
    return torch.stack([_weighted(column_C), _weighted(torch.cat(row_R)), _weighted(torch.cat(upper_R))])


def _weighted(sum_W: Tensor) -> Tensor:
    size = 1 << (len(sum_W) - 1).bit_length()
    return (sum_W * _odd(size, sum_W.device)[: len(sum_W)]).sum()


@lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random (splitmix64's first rounds), int64 [count]."""
    x = (torch.arange(count, dtype=torch.int64, device=device) + 1) * GAMMA
    return ((x ^ (x >> 30)) * MIX) | 1

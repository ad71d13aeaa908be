"""The dtype sums are taken in."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for every other float dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32

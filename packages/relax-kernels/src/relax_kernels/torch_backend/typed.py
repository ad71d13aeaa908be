"""Small helpers of this backend: the dtype sums are taken in, and autograd's untyped entry."""

from __future__ import annotations

from typing import Any

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for every other float dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def on_host(x: torch.Tensor) -> bool:
    """Tell whether a tensor's values can be looked at without waiting for a device."""
    return x.device.type == "cpu"

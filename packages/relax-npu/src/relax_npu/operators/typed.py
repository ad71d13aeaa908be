"""torch's autograd functions and splits with types, which torch leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run an autograd function on its arguments."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def split(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return consecutive parts of one axis, as views."""
    return torch.split_with_sizes(x, list(sizes), dim)

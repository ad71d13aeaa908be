"""New memory full of NaN, so that what is read before it is written shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MAKERS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Let torch's functions that return uninitialised floats fill them with NaN in this context."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _MAKERS]
    for owner, name, make in before:
        setattr(owner, name, _filled(make))
    try:
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return wrapper

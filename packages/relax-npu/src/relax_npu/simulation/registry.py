"""Registers simulated operators under their real schemas, and checks every call of them.

An operator is defined from the frozen schema of the chosen release, so torch itself refuses a call that the
release would refuse: a wrong name, a missing argument, a tensor where numbers are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from relax_npu.schema import Snapshot
from relax_npu.simulation.kernels import executed, on_host, on_npu, require_one_device

Kernel = Callable[..., Any]
_libraries: list[torch.library.Library] = []


class RefusedCallError(RuntimeError):
    """An NPU operator was called with a layout, dtype or length that it does not take."""


def define(release: Snapshot, kernels: dict[str, Kernel]) -> None:
    """Defines the operators of a release that relax-npu calls, `torch.ops.npu.<name>`.

    Args:
        release: names and schemas.
        kernels: for each operator a function of host tensors.
    """
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in release.schemas.items():
        library.define(schema.text)  # type: ignore[no-untyped-call]
        library.impl(name, _checked(name, kernels[name]), "PrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _checked(name: str, kernel: Kernel) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        executed[f"npu.{name}"] += 1
        require_one_device(name, (args, kwargs))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RefusedCallError(
                f"{name} is called where a gradient is wanted; only an autograd.Function may call it"
            )
        with torch.no_grad():
            return on_npu(kernel(*on_host(args), **on_host(kwargs)))

    return run


def require(holds: bool, message: str) -> None:
    """Refuses a call.

    Raises:
        RefusedCallError: with the message, unless the condition holds.
    """
    if not holds:
        raise RefusedCallError(message)


def require_shape(name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    """Requires a tensor's exact shape, laid out densely, as the kernels address it."""
    require(tuple(x.shape) == tuple(shape), f"{name} must be {tuple(shape)}, given {tuple(x.shape)}")
    require(x.is_contiguous(), f"{name} must be contiguous")


def require_dtype(name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
    """Requires one of some dtypes."""
    require(x.dtype in allowed, f"{name} must be one of {allowed}, given {x.dtype}")

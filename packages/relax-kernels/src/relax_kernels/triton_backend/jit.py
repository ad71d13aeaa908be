"""Triton's compiler decorator and autograd's entry, with types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton


def jit(function: Callable[..., Any], *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Make a Triton kernel of a function.

    Args:
        function: the kernel.
        do_not_specialize: whole numbers that change from call to call; for others Triton compiles once more
            where they are 1 or a multiple of 16.
    """
    return triton.jit(function, do_not_specialize=do_not_specialize)


def gluon_jit(function: Callable[..., Any]) -> Any:
    """Make a kernel of a function written in Triton's lower level."""
    from triton.experimental import gluon

    return gluon.jit(function)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]

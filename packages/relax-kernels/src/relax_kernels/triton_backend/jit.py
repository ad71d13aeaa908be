"""Triton's compiler decorator and autograd's entry, with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton


def jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel of a function."""
    return triton.jit(function)


def gluon_jit(function: Callable[..., Any]) -> Any:
    """Make a kernel of a function written in Triton's lower level."""
    from triton.experimental import gluon

    return gluon.jit(function)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]

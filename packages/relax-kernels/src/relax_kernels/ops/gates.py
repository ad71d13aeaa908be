"""Gated products: SwiGLU of the feed-forward and the sigmoid gate of the attention output.

F feed-forward features; "..." any leading axes.
"""

from __future__ import annotations

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation


def swiglu(gate_up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Return silu(gate) * up for gate_up = [gate; up] along the last axis; differentiable.

    Args:
        gate_up: [..., 2 F].
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        [..., F] in the input's dtype, computed in float32 (float64 for float64 inputs) and rounded once.

    Raises:
        InvalidInput: the last axis is odd, or the dtype is not a float.
        NoBackend: no backend serves the call.
    """
    call = swiglu_call(gate_up)
    result: torch.Tensor = implementation(call, backend)(gate_up)
    return result


def swiglu_call(gate_up: torch.Tensor) -> Call:
    """Check the input of `swiglu` and describe the call."""
    check = Checker("swiglu")
    check.tensor("gate_up", gate_up, ("...", "2F"))
    check.require(
        check.sizes["2F"] % 2 == 0, f"gate_up has {check.sizes['2F']} features; an even number is needed"
    )
    check.bind("F", check.sizes["2F"] // 2, "gate_up")
    return check.call([gate_up], {})


def output_gate(x: torch.Tensor, gate: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Return x * sigmoid(gate), elementwise; differentiable.

    The gate of Qwen3.5's attention output, and (one number for each row) that of its shared expert.

    Args:
        x: [..., D].
        gate: x's shape, or [..., 1]; x's dtype.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        x's shape and dtype, computed in float32 (float64 for float64 inputs) and rounded once.

    Raises:
        InvalidInput: shapes, dtypes or devices differ.
        NoBackend: no backend serves the call.
    """
    call = output_gate_call(x, gate)
    result: torch.Tensor = implementation(call, backend)(x, gate.expand_as(x))
    return result


def output_gate_call(x: torch.Tensor, gate: torch.Tensor) -> Call:
    """Check the inputs of `output_gate` and describe the call."""
    check = Checker("output_gate")
    check.tensor("x", x, ("...", "D"))
    check.tensor("gate", gate, ("...", "gate's D"), same_dtype_as=x)
    check.require(
        gate.shape in (x.shape, (*x.shape[:-1], 1)),
        f"gate has shape {tuple(gate.shape)}; it must be {tuple(x.shape)} as x's, or {(*x.shape[:-1], 1)}",
    )
    return check.call([x, gate], {})

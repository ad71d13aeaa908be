"""Root-mean-square norms over the last axis: plain, zero-centred, of a sum, and gated.

D normalised features; "..." any leading axes.
"""

from __future__ import annotations

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation


def rms_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
    backend: str | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * w over the last axis, w = weight or 1 + weight; differentiable.

    Qwen3.5's block, query and key norms are zero-centred (stored weight 0 means factor 1). Computed in
    float32 (float64 for float64 inputs) and rounded once, to x's dtype.

    Args:
        x: [..., D].
        weight_D: any float dtype.
        eps: added to the mean square.
        zero_centred: whether the factor is 1 + weight.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = rms_norm_call(x, weight_D, eps=eps, zero_centred=zero_centred)
    result: torch.Tensor = implementation(call, backend)(x, weight_D, eps=eps, zero_centred=zero_centred)
    return result


def rms_norm_call(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool) -> Call:
    """Check the inputs of `rms_norm` and describe the call."""
    check = Checker("rms_norm")
    check.tensor("x", x, ("...", "D"))
    check.tensor("weight_D", weight_D, "D")
    check.not_negative("eps", eps)
    check.flags(zero_centred=zero_centred)
    return check.call([x, weight_D], {"eps": eps, "zero_centred": zero_centred})


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) in one pass over memory; differentiable in all three.

    What stands between two blocks of a layer. The sum is rounded to x's dtype and the norm is that of the
    rounded sum, so that the results are those of an addition and `rms_norm`.

    Args:
        x: [..., D], the output of a block.
        residual: x's shape and dtype.
        weight_D: any float dtype.
        eps: added to the mean square.
        zero_centred: whether the factor is 1 + weight.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        The norm, for the next block, and the sum, its residual; both of x's shape and dtype.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = add_rms_norm_call(x, residual, weight_D, eps=eps, zero_centred=zero_centred)
    normed, total = implementation(call, backend)(x, residual, weight_D, eps=eps, zero_centred=zero_centred)
    return normed, total


def add_rms_norm_call(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, *, eps: float, zero_centred: bool
) -> Call:
    """Check the inputs of `add_rms_norm` and describe the call."""
    check = Checker("add_rms_norm")
    check.tensor("x", x, ("...", "D"))
    check.tensor("residual", residual, ("...", "D"), same_dtype_as=x)
    check.same_shape("residual", residual, "x", x)
    check.tensor("weight_D", weight_D, "D")
    check.not_negative("eps", eps)
    check.flags(zero_centred=zero_centred)
    return check.call([x, residual, weight_D], {"eps": eps, "zero_centred": zero_centred})


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last axis; differentiable.

    The norm of the delta-net's output in Qwen3.5. Computed in float32 (float64 for float64 inputs) and
    rounded once, to x's dtype.

    Args:
        x: [..., D].
        gate: x's shape and dtype.
        weight_D: any float dtype.
        eps: added to the mean square.
        backend: name of the backend to use; None lets the registry choose.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = gated_rms_norm_call(x, gate, weight_D, eps=eps)
    result: torch.Tensor = implementation(call, backend)(x, gate, weight_D, eps=eps)
    return result


def gated_rms_norm_call(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> Call:
    """Check the inputs of `gated_rms_norm` and describe the call."""
    check = Checker("gated_rms_norm")
    check.tensor("x", x, ("...", "D"))
    check.tensor("gate", gate, ("...", "D"), same_dtype_as=x)
    check.same_shape("gate", gate, "x", x)
    check.tensor("weight_D", weight_D, "D")
    check.not_negative("eps", eps)
    return check.call([x, gate, weight_D], {"eps": eps})

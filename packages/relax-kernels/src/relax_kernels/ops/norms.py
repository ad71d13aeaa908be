"""Root-mean-square norms over the last axis, plain, zero-centred and gated.

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
    check.require(eps >= 0, f"eps must not be negative, given {eps}")
    return check.call([x, weight_D], {"eps": eps, "zero_centred": zero_centred})


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
    check.require(
        gate.shape == x.shape,
        f"gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}; they must be equal",
    )
    check.tensor("weight_D", weight_D, "D")
    check.require(eps >= 0, f"eps must not be negative, given {eps}")
    return check.call([x, gate, weight_D], {"eps": eps})

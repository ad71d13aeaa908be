"""The two gates of the delta rule from their projections: decay and step size.

T tokens, U value heads.
"""

from __future__ import annotations

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.registry import implementation


def delta_gates(
    a_TU: torch.Tensor,
    b_TU: torch.Tensor,
    A_log_U: torch.Tensor,
    dt_bias_U: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b); differentiable in all four.

    What `gated_delta_rule` takes, from two slices of the layer's projection. Computed in float32 (float64 for
    float64 inputs) and rounded once. The formula is that of transformers' `Qwen3_5GatedDeltaNet`.

    Args:
        a_TU: projection that becomes the decay.
        b_TU: projection that becomes the step size; a's dtype.
        A_log_U: logarithm of the decay's rate; any float dtype.
        dt_bias_U: added to a; any float dtype.
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        g_TU, the logarithm of the decay (at most 0), in float32 (float64 for float64 inputs), and beta_TU in
        b's dtype.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit together.
        NoBackend: no backend serves the call.
    """
    call = delta_gates_call(a_TU, b_TU, A_log_U, dt_bias_U)
    g_TU, beta_TU = implementation(call, backend)(a_TU, b_TU, A_log_U, dt_bias_U)
    return g_TU, beta_TU


def delta_gates_call(
    a_TU: torch.Tensor, b_TU: torch.Tensor, A_log_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> Call:
    """Check the inputs of `delta_gates` and describe the call."""
    check = Checker("delta_gates")
    check.tensor("a_TU", a_TU, "TU")
    check.tensor("b_TU", b_TU, "TU", same_dtype_as=a_TU)
    check.tensor("A_log_U", A_log_U, "U")
    check.tensor("dt_bias_U", dt_bias_U, "U")
    return check.call([a_TU, b_TU, A_log_U, dt_bias_U], {})

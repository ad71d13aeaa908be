"""Causal depthwise convolution over packed sequences.

T tokens, N sequences, C channels, W taps. States hold the W - 1 inputs before the next token, oldest first.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from relax_kernels.check import Checker
from relax_kernels.contract import Call
from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.registry import implementation

Activation = Literal["silu"] | None


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    cu_seqlens: CuSeqlens,
    activation: Activation = "silu",
    initial_state_NCW: torch.Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel with its own W taps, inside each sequence only; differentiable in every tensor.

    y[t, c] = act(bias[c] + sum_j weight[c, W - 1 - j] * x[t - j, c]) where x before a sequence is its initial
    state or 0. The last tap meets the current token (as torch.nn.Conv1d with W - 1 left padding has it).

    Args:
        x_TC: inputs.
        weight_CW: taps, 2 <= W <= 8; any float dtype.
        bias_C: bias; any float dtype.
        cu_seqlens: lengths of the N sequences; empty ones are allowed.
        activation: "silu" or None.
        initial_state_NCW: the W - 1 inputs before each sequence, [N, C, W - 1], oldest first.
        output_final_state: also return the last W - 1 inputs of each sequence (initial state included).
        backend: name of the backend to use; None lets the registry choose.

    Returns:
        y_TC in x's dtype (sums in float32), and the final states [N, C, W - 1] in x's dtype or None.

    Raises:
        InvalidInput: shapes, dtypes, devices or lengths do not fit together.
        NoBackend: no backend serves the call.
    """
    options: dict[str, Any] = {"activation": activation, "output_final_state": output_final_state}
    call = causal_conv1d_call(
        x_TC, weight_CW, bias_C, cu_seqlens=cu_seqlens, initial_state_NCW=initial_state_NCW, **options
    )
    result: tuple[torch.Tensor, torch.Tensor | None] = implementation(call, backend)(
        x_TC, weight_CW, bias_C, cu_seqlens=cu_seqlens, initial_state_NCW=initial_state_NCW, **options
    )
    return result


def causal_conv1d_call(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    cu_seqlens: CuSeqlens,
    initial_state_NCW: torch.Tensor | None = None,
    activation: Activation = "silu",
    output_final_state: bool = False,
) -> Call:
    """Check the inputs of `causal_conv1d` and describe the call."""
    check = Checker("causal_conv1d")
    check.tensor("x_TC", x_TC, "TC")
    tensors = [x_TC, *_check_taps(check, weight_CW, bias_C, activation)]
    check.flags(output_final_state=output_final_state)
    check.lengths("cu_seqlens", cu_seqlens, "T")
    check.bind("N", len(cu_seqlens), "cu_seqlens")
    if initial_state_NCW is not None:
        _check_state(check, "initial_state_NCW", initial_state_NCW, x_TC)
        tensors.append(initial_state_NCW)
    options = {
        "activation": activation,
        "output_final_state": output_final_state,
        "has_bias": bias_C is not None,
        "has_initial_state": initial_state_NCW is not None,
    }
    return check.call(tensors, options, cu_seqlens)


def causal_conv1d_step(
    x_NC: torch.Tensor,
    state_NCW: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one new token of each of N sequences (decoding); formula and arguments as `causal_conv1d`.

    Returns y_NC and the new state [N, C, W - 1], both in x's dtype. The given state is not changed. No
    backward pass is promised.
    """
    call = causal_conv1d_step_call(x_NC, state_NCW, weight_CW, bias_C, activation=activation)
    result: tuple[torch.Tensor, torch.Tensor] = implementation(call, backend)(
        x_NC, state_NCW, weight_CW, bias_C, activation=activation
    )
    return result


def causal_conv1d_step_call(
    x_NC: torch.Tensor,
    state_NCW: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
) -> Call:
    """Check the inputs of `causal_conv1d_step` and describe the call."""
    check = Checker("causal_conv1d_step")
    check.tensor("x_NC", x_NC, "NC")
    tensors = [x_NC, state_NCW, *_check_taps(check, weight_CW, bias_C, activation)]
    _check_state(check, "state_NCW", state_NCW, x_NC)
    return check.call(tensors, {"activation": activation, "has_bias": bias_C is not None})


def _check_taps(
    check: Checker, weight_CW: torch.Tensor, bias_C: torch.Tensor | None, activation: Any
) -> list[torch.Tensor]:
    check.tensor("weight_CW", weight_CW, "CW")
    width = check.sizes["W"]
    check.require(2 <= width <= 8, f"weight_CW has W = {width} taps; 2 to 8 are allowed")
    check.require(activation in ("silu", None), f"activation must be 'silu' or None, given {activation!r}")
    if bias_C is None:
        return [weight_CW]
    check.tensor("bias_C", bias_C, "C")
    return [weight_CW, bias_C]


def _check_state(check: Checker, name: str, state: torch.Tensor, x: torch.Tensor) -> None:
    check.bind("W - 1", check.sizes["W"] - 1, "weight_CW")
    check.tensor(name, state, ("N", "C", "W - 1"), same_dtype_as=x)

"""The triton backend's table of operators, and which calls it leaves to others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from relax_kernels.contract import Call
from relax_kernels.errors import BackendUnavailable

_FOLDER = "relax_kernels.triton_backend"
OPERATORS = {
    "gated_delta_rule": (
        "delta_rule",
        "triton kernels, chunks of 64; on Hopper with K = V of 64 or 128 their gluon forms",
    ),
    "causal_conv1d": ("conv", "triton kernel"),
    "adamw_step": ("adam", "triton kernel"),
    "adamw_steps": ("adam", "triton kernel, one launch for all tensors"),
    "attention": (
        "attention",
        "torch's flash attention; cuDNN for causal sequences of one length, head dim over 128, without lse",
    ),
    "rms_norm": ("norms", "triton kernel"),
    "gated_rms_norm": ("norms", "triton kernel"),
    "add_rms_norm": ("norms", "triton kernel"),
    "delta_gates": ("delta_gates", "triton kernel"),
    "rotary": ("rotary", "triton kernel"),
    "swiglu": ("gates", "triton kernel"),
    "output_gate": ("gates", "triton kernel"),
    "linear_logprob": ("logprob", "BLAS products and triton kernels, slices of the vocabulary"),
    "router_topk": ("router", "triton kernel"),
    "permute_tokens": ("experts", "triton kernel"),
    "unpermute_tokens": ("experts", "triton kernel"),
    "grouped_matmul": ("experts", "torch's grouped matrix product"),
    "gated_delta_rule_step": ("decode", "triton kernel"),
    "causal_conv1d_step": ("decode", "triton kernel"),
}
"""Operator to (file with the function of the same name, what runs)."""
_HALF = (torch.bfloat16, torch.float16)
_DELTA_DIMS = (16, 32, 64, 128)


class TritonBackend:
    """Serves CUDA devices from compute capability 8.0."""

    name = "triton"
    device_types: frozenset[str] | None = frozenset({"cuda"})
    priority = 100
    operators = frozenset(OPERATORS)

    def refusal(self, call: Call) -> str | None:
        """Say why a call is left to another backend; None if it is served."""
        if torch.version.hip is not None:
            return "was made for NVIDIA devices; this torch is built for ROCm"
        if call.dtype == torch.float64:
            return "computes in float32; float64 is the reference's"
        check = _REFUSALS.get(call.op)
        return check(call) if check is not None else None

    def implementation(self, op: str) -> Callable[..., Any]:
        """Return the function for an operator; imports triton."""
        return _function(op)

    def describe(self, call: Call) -> str:
        """Name what would run."""
        return OPERATORS[call.op][1]


@cache
def _function(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"{_FOLDER}.{OPERATORS[op][0]}"), op)
    return function


def create() -> TritonBackend:
    """Entry point of the registry. Raises BackendUnavailable where triton is not installed."""
    if find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed")
    return TritonBackend()


def _delta_rule(call: Call) -> str | None:
    sizes = call.sizes
    if call.dtype != torch.bfloat16:
        return f"has gated_delta_rule for bfloat16 only, given {call.dtype}"
    if sizes["K"] not in _DELTA_DIMS or sizes["V"] not in _DELTA_DIMS:
        return f"has head dims {_DELTA_DIMS}, given K = {sizes['K']}, V = {sizes['V']}"
    return None


def _attention(call: Call) -> str | None:
    sizes = call.sizes
    if call.dtype not in _HALF:
        return f"flash attention takes bfloat16 and float16, given {call.dtype}"
    if sizes["D"] != sizes["E"]:
        return f"flash attention wants values of the keys' head dim, given {sizes['E']} and {sizes['D']}"
    if sizes["D"] % 8 or sizes["D"] > 256:
        return f"flash attention takes head dims up to 256 that are multiples of 8, given {sizes['D']}"
    if not (sizes["T"] and sizes["S"]):
        return "flash attention wants at least one query and one key"
    return None


def _conv(call: Call) -> str | None:
    return None if call.sizes["W"] <= 4 else f"has 2 to 4 taps, given {call.sizes['W']}"


def _norm(call: Call) -> str | None:
    return None if 0 < call.sizes["D"] <= 16384 else f"has 1 to 16384 features, given {call.sizes['D']}"


def _rotary(call: Call) -> str | None:
    return None if call.sizes["R"] else "has nothing to rotate"


def _logprob(call: Call) -> str | None:
    if call.dtype not in _HALF:
        return f"takes bfloat16 and float16, whose products it keeps in float32, given {call.dtype}"
    return None


def _router(call: Call) -> str | None:
    sizes = call.sizes
    if sizes["E"] > 1024 or sizes["K"] > 16:
        return f"chooses at most 16 of 1024 experts, given {sizes['K']} of {sizes['E']}"
    return None


def _grouped(call: Call) -> str | None:
    sizes = call.sizes
    if call.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, given {call.dtype}"
    if sizes["D"] % 8 or sizes["F"] % 8:
        return f"torch's grouped product wants features in eights, given {sizes['D']} and {sizes['F']}"
    if not (sizes["P"] and sizes["E"]):
        return "torch's grouped product wants at least one row and one expert"
    return None


def _delta_step(call: Call) -> str | None:
    sizes = call.sizes
    if call.needs_grad:
        return "has no backward pass of a decode step"
    return None if sizes["K"] <= 256 else f"has key dims up to 256, given {sizes['K']}"


def _conv_step(call: Call) -> str | None:
    return "has no backward pass of a decode step" if call.needs_grad else _conv(call)


_REFUSALS: dict[str, Callable[[Call], str | None]] = {
    "gated_delta_rule": _delta_rule,
    "attention": _attention,
    "causal_conv1d": _conv,
    "rms_norm": _norm,
    "gated_rms_norm": _norm,
    "add_rms_norm": _norm,
    "rotary": _rotary,
    "linear_logprob": _logprob,
    "router_topk": _router,
    "grouped_matmul": _grouped,
    "gated_delta_rule_step": _delta_step,
    "causal_conv1d_step": _conv_step,
}

"""The torch backend's table of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_kernels.contract import Call
from relax_kernels.torch_backend import (
    adam,
    attention,
    conv,
    delta_gates,
    delta_rule,
    delta_step,
    experts,
    gates,
    logprob,
    norms,
    rotary,
)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "adamw_step": adam.adamw_step,
    "adamw_steps": adam.adamw_steps,
    "gated_delta_rule": delta_rule.gated_delta_rule,
    "gated_delta_rule_step": delta_step.gated_delta_rule_step,
    "delta_gates": delta_gates.delta_gates,
    "causal_conv1d": conv.causal_conv1d,
    "causal_conv1d_step": conv.causal_conv1d_step,
    "attention": attention.attention,
    "rms_norm": norms.rms_norm,
    "add_rms_norm": norms.add_rms_norm,
    "gated_rms_norm": norms.gated_rms_norm,
    "rotary": rotary.rotary,
    "swiglu": gates.swiglu,
    "output_gate": gates.output_gate,
    "linear_logprob": logprob.linear_logprob,
    "router_topk": experts.router_topk,
    "sort_by_expert": experts.sort_by_expert,
    "permute_tokens": experts.permute_tokens,
    "unpermute_tokens": experts.unpermute_tokens,
    "grouped_matmul": experts.grouped_matmul,
}


class TorchBackend:
    """Serves every operator on every device, so that there is always an answer."""

    name = "torch"
    device_types: frozenset[str] | None = None
    priority = 0
    operators = frozenset(IMPLEMENTATIONS)

    def refusal(self, call: Call) -> str | None:
        """Refuse nothing: what passed the checks is served."""
        return None

    def implementation(self, op: str) -> Callable[..., Any]:
        """Return the function for an operator."""
        return IMPLEMENTATIONS[op]

    def describe(self, call: Call) -> str:
        """Say that the reference runs."""
        return "torch reference"

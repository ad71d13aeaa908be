"""`explain`: which backend would serve a call, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_kernels.contract import Call
from relax_kernels.errors import InvalidInput
from relax_kernels.ops import (
    adam,
    attention,
    conv,
    delta_gates,
    delta_rule,
    experts,
    gates,
    logprob,
    norms,
    rotary,
)
from relax_kernels.registry import Explanation, explain_call

CALLS: dict[str, Callable[..., Call]] = {
    "adamw_step": adam.adamw_step_call,
    "adamw_steps": adam.adamw_steps_call,
    "gated_delta_rule": delta_rule.delta_rule_call,
    "gated_delta_rule_step": delta_rule.delta_rule_step_call,
    "delta_gates": delta_gates.delta_gates_call,
    "causal_conv1d": conv.causal_conv1d_call,
    "causal_conv1d_step": conv.causal_conv1d_step_call,
    "attention": attention.attention_call,
    "rms_norm": norms.rms_norm_call,
    "add_rms_norm": norms.add_rms_norm_call,
    "gated_rms_norm": norms.gated_rms_norm_call,
    "rotary": rotary.rotary_call,
    "swiglu": gates.swiglu_call,
    "output_gate": gates.output_gate_call,
    "linear_logprob": logprob.linear_logprob_call,
    "router_topk": experts.router_topk_call,
    "sort_by_expert": experts.sort_by_expert_call,
    "permute_tokens": experts.permute_tokens_call,
    "unpermute_tokens": experts.unpermute_tokens_call,
    "grouped_matmul": experts.grouped_matmul_call,
}
"""For each operator the function that checks its arguments and describes the call."""


def explain(
    op: str, *args: Any, backend: str | None = None, device_type: str | None = None, **kwargs: Any
) -> Explanation:
    """Tell which backend would serve `op(*args, **kwargs)` and why the others would not; runs nothing.

    Args:
        op: name of an operator.
        args: the operator's arguments; tensors may live on the `meta` device.
        backend: as in the operator.
        device_type: answer as if the tensors were on this type of device (`cuda`, `npu`).
        kwargs: the operator's keyword arguments.

    Raises:
        InvalidInput: no such operator, or the operator would refuse the arguments.
    """
    if op not in CALLS:
        raise InvalidInput(f"explain: no operator {op!r}; there are {', '.join(sorted(CALLS))}")
    try:
        inspect.signature(CALLS[op]).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInput(f"explain: {op} does not take these arguments: {error}") from None
    call = CALLS[op](*args, **kwargs)
    if device_type is not None:
        call = replace(call, device_type=device_type)
    return explain_call(call, backend)

"""The delta net's operators, under the names by which SGLang imports them."""

from relax_rollout.engines.sglang.cpu.ops import causal_conv1d_fn as causal_conv1d_fn_cpu
from relax_rollout.engines.sglang.cpu.ops import causal_conv1d_update as causal_conv1d_update_cpu
from relax_rollout.engines.sglang.cpu.ops import chunk_gated_delta_rule as chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]

"""Operators of Qwen3.5-class models: one reference each, fast backends beside it."""

from importlib.metadata import version

from relax_kernels.contract import Backend, Call
from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.errors import BackendUnavailable, InvalidInput, NoBackend
from relax_kernels.explanation import explain
from relax_kernels.ops.adam import adamw_step, adamw_steps
from relax_kernels.ops.adam_shards import AdamShard, AdamShards
from relax_kernels.ops.attention import attention
from relax_kernels.ops.conv import causal_conv1d, causal_conv1d_step
from relax_kernels.ops.delta_gates import delta_gates
from relax_kernels.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from relax_kernels.ops.experts import (
    Permutation,
    Routing,
    grouped_matmul,
    permute_tokens,
    router_topk,
    sort_by_expert,
    unpermute_tokens,
)
from relax_kernels.ops.gates import output_gate, swiglu
from relax_kernels.ops.logprob import LogProbs, linear_logprob
from relax_kernels.ops.norms import add_rms_norm, gated_rms_norm, rms_norm
from relax_kernels.ops.rotary import rotary, rotary_cos_sin
from relax_kernels.registry import Explanation, backends, set_strict
from relax_kernels.split_float import join_float32, split_float32

__version__ = version("relax-kernels")

from relax_kernels.upload import upload

__all__ = [
    "AdamShard",
    "AdamShards",
    "Backend",
    "BackendUnavailable",
    "Call",
    "CuSeqlens",
    "Explanation",
    "InvalidInput",
    "LogProbs",
    "NoBackend",
    "Permutation",
    "Routing",
    "adamw_step",
    "adamw_steps",
    "add_rms_norm",
    "attention",
    "backends",
    "causal_conv1d",
    "causal_conv1d_step",
    "delta_gates",
    "explain",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "grouped_matmul",
    "join_float32",
    "linear_logprob",
    "output_gate",
    "permute_tokens",
    "rms_norm",
    "rotary",
    "rotary_cos_sin",
    "router_topk",
    "set_strict",
    "sort_by_expert",
    "split_float32",
    "swiglu",
    "unpermute_tokens",
    "upload",
]

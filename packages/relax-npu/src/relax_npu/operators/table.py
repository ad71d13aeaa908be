"""The capability table: which operators `ascend` has, what runs, for which calls, and who computes gradients.

Needs no torch: the command line and the documentation read it on any machine.
"""

from dataclasses import dataclass

HALF = ("bfloat16", "float16")
ALL = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Capability:
    """One operator of relax-kernels on the NPU.

    Attributes:
        operator: its name in relax-kernels.
        module: the file of this package with the function of that name.
        runs: what runs, for people.
        needs: the NPU operators that every call needs; without them the operator is refused.
        dtypes: of the main input.
        limits: which other calls are refused (and served by the torch reference on the NPU).
        backward: who computes the gradient.
        confirm: what only a device can tell.
    """

    operator: str
    module: str
    runs: str
    needs: tuple[str, ...]
    dtypes: tuple[str, ...]
    limits: str
    backward: str
    confirm: str = "speed"


CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "attention",
        "attention",
        "npu_fusion_attention, layout TND, compressed causal mask",
        ("npu_fusion_attention", "npu_fusion_attention_grad"),
        ALL,
        "head dim a multiple of 16, equal for keys and values, at most 512; no causal sequence with more "
        "queries than keys, no queries without keys",
        "npu_fusion_attention_grad; the log-sum-exp's gradient through a widened value",
        "sequences of length 0 inside a pack; head dims of 257 and more in the backward pass",
    ),
    Capability(
        "rms_norm",
        "norms",
        "npu_rms_norm in float32",
        ("npu_rms_norm", "npu_rms_norm_backward"),
        ALL,
        "none",
        "npu_rms_norm_backward, from the input as it came",
    ),
    Capability(
        "add_rms_norm",
        "norms",
        "an addition and npu_rms_norm",
        ("npu_rms_norm", "npu_rms_norm_backward"),
        ALL,
        "none",
        "npu_rms_norm_backward",
    ),
    Capability(
        "gated_rms_norm",
        "norms",
        "npu_rms_norm in float32, then torch's silu",
        ("npu_rms_norm", "npu_rms_norm_backward"),
        ALL,
        "none",
        "npu_rms_norm_backward and autograd",
    ),
    Capability(
        "rotary",
        "rotary",
        "npu_rotary_mul in float32, mode half, layout BSND",
        ("npu_rotary_mul",),
        ALL,
        "2 to 896 rotated features",
        "npu_rotary_mul by the opposite angle",
        "numbers of rotated features that are no multiple of 64",
    ),
    Capability(
        "swiglu",
        "gates",
        "npu_swiglu",
        ("npu_swiglu", "npu_swiglu_backward"),
        ALL,
        "none",
        "npu_swiglu_backward",
    ),
    Capability(
        "grouped_matmul",
        "experts",
        "npu_grouped_matmul, one list of counts on the device",
        ("npu_grouped_matmul",),
        HALF,
        "features in sixteens",
        "ours: two npu_grouped_matmul, for torch_npu has none",
        "experts without rows in the weight gradient; weights as a transposed view",
    ),
    Capability(
        "permute_tokens",
        "experts",
        "index_select by the given rows",
        ("npu_moe_token_permute_grad",),
        HALF,
        "at most 512 choices of each token",
        "npu_moe_token_permute_grad",
    ),
    Capability(
        "unpermute_tokens",
        "experts",
        "npu_moe_token_unpermute",
        ("npu_moe_token_unpermute", "npu_moe_token_unpermute_grad"),
        HALF,
        "at most 512 choices of each token",
        "npu_moe_token_unpermute_grad",
    ),
    Capability(
        "causal_conv1d",
        "conv",
        "fla_npu's npu_causal_conv1d, layout TND, weight [W, C]",
        ("npu_causal_conv1d",),
        HALF,
        "2 to 4 taps, channels in sixteens; weight and bias of the input's dtype",
        "npu_causal_conv1d_bwd where fla_npu has it (v26.6.0), else ours in torch",
        "the kernel's neighbours in memory (fla_npu issue 636)",
    ),
    Capability(
        "gated_delta_rule",
        "delta_rule",
        "fla_npu's chunked kernels, chunks of 64; decay sums and the triangular inverse in torch",
        (
            "npu_recompute_w_u_fwd",
            "npu_chunk_gated_delta_rule_fwd_h",
            "npu_chunk_fwd_o",
            "npu_chunk_bwd_dv_local",
            "npu_chunk_gated_delta_rule_bwd_dhu",
            "npu_chunk_bwd_dqkwg",
            "npu_prepare_wy_repr_bwd_da",
            "npu_prepare_wy_repr_bwd_full",
        ),
        HALF,
        "key dim up to 128 (padded to 128), value dim up to 256 (padded to 128 or 256)",
        "fla_npu's backward kernels; states get theirs through 128 added tokens, for the kernels drop it",
        "tails of one token in a chunk (fla_npu issue 367)",
    ),
)

BY_TORCH: dict[str, str] = {
    "gated_delta_rule_step": "the NPU's kernel keeps its state in bfloat16 only",
    "causal_conv1d_step": "decoding is the engine's work",
    "delta_gates": "no fused operator",
    "output_gate": "no fused operator",
    "linear_logprob": "chunks of matrix products, no fused operator",
    "router_topk": "npu_moe_gating_top_k_softmax has no gradient",
    "sort_by_expert": "a stable sort of the chosen experts",
    "adamw_step": "elementwise, no fused operator for split float32 weights",
    "adamw_steps": "elementwise, no fused operator for split float32 weights",
}
"""Operators that the torch reference serves on the NPU, and why."""

BY_NAME = {capability.operator: capability for capability in CAPABILITIES}


def needed_operators() -> tuple[str, ...]:
    """Every NPU operator that some capability needs, sorted."""
    return tuple(sorted({name for capability in CAPABILITIES for name in capability.needs}))

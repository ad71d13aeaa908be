"""Qwen2-MoE's second stream: used where there is one."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.models.qwen2_moe`: the block asks a stream that only CUDA has."""
    block = module.Qwen2MoeSparseMoeBlock
    usual = block.forward_normal_dual_stream

    def forward(self: Any, hidden_states: Any, use_fused_gate: bool = False) -> Any:
        if self.alt_stream is not None:
            return usual(self, hidden_states, use_fused_gate)
        shared = None
        if self.shared_expert is not None:
            shared = self._forward_shared_experts(hidden_states, apply_gate=not use_fused_gate)
        return self._forward_router_experts(hidden_states), shared

    block.forward_normal_dual_stream = forward

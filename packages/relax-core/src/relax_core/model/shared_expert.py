"""The expert that every token visits, and its gate.

Axes: T tokens of this rank, 1 (Megatron's batch axis), D hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_core.model.mlp import SwigluMlp


class SharedExpert(SwigluMlp):
    """sigmoid(gate(x)) * feed_forward(x); the gate is one number a token.

    Args:
        config: Megatron's config; sizes are `moe_shared_expert_intermediate_size` and `hidden_size`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, ffn_size=config.moe_shared_expert_intermediate_size)
        self.gate_weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.gate_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.gate_weight)

    def forward(self, hidden_T1D: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias)."""
        out_T1D, _bias = super().forward(hidden_T1D, **options)
        return F.linear(hidden_T1D, self.gate_weight).sigmoid() * out_T1D, None

"""The router: which experts a token asks for.

Axes: T tokens of this rank, E experts of the whole model, D hidden.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_core.model.norm import at_least_float32


class Router(MegatronModule):  # type: ignore[misc]
    """Logits of every expert, in float32 whatever the weights' dtype.

    Every rank holds the whole weight and sees tokens of its own.

    Args:
        config: Megatron's config; sizes are `num_moe_experts` and `hidden_size`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        shape = (config.num_moe_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> logits [T, E], float32 (float64 for float64 tokens)."""
        dtype = at_least_float32(x_TD.dtype)
        return F.linear(x_TD.to(dtype), self.weight.to(dtype))

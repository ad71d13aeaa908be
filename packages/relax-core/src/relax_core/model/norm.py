"""RMS norm as a Megatron module."""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import rms_norm


class RMSNorm(MegatronModule):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) times 1 + weight (zero-centred) or weight, over the last axis.

    The weight is stored as Hugging Face stores it. Under sequence parallelism each rank sees a part of the
    tokens, so the weight is marked for Megatron to sum its gradient over the tensor-parallel ranks.

    Args:
        config: Megatron's config.
        hidden_size: features of the last axis.
        eps: added to the mean square.
        zero_centred: whether a weight of 0 means a factor of 1.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, zero_centred: bool = True
    ) -> None:
        super().__init__(config)
        self.eps = eps
        self.zero_centred = zero_centred
        fill = torch.zeros if zero_centred else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D] in x's dtype; the sums are float32."""
        return rms_norm(x, self.weight, eps=self.eps, zero_centred=self.zero_centred)

"""RMS norms as Megatron modules."""

from typing import Any, cast

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import gated_rms_norm, rms_norm


class _NormWeight(MegatronModule):  # type: ignore[misc]
    """Owns a norm's weight and completes its gradient.

    Over tokens that are spread (sequence parallelism) the weight is marked, so that Megatron sums its
    gradient over the tensor-parallel ranks. Over heads that are spread (`heads_over`, a process group) each
    rank holds a part of the gradient, which the backward pass sums.
    """

    def __init__(self, config: TransformerConfig, weight: torch.Tensor, eps: float, heads_over: Any) -> None:
        super().__init__(config)
        self.eps = eps
        self.heads_over = heads_over
        self.weight = torch.nn.Parameter(weight)
        tokens_spread = config.sequence_parallel and heads_over is None
        self.weight.sequence_parallel = tokens_spread  # type: ignore[attr-defined]

    def whole_weight(self) -> torch.Tensor:
        """The weight, whose gradient will be complete on every rank."""
        if self.heads_over is None or self.heads_over.size() == 1:
            return self.weight
        return cast(torch.Tensor, copy_to_tensor_model_parallel_region(self.weight, group=self.heads_over))


class RMSNorm(_NormWeight):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last axis; the weight is stored as Hugging Face does.

    Args:
        config: Megatron's config.
        hidden_size: features of the last axis.
        eps: added to the mean square.
        heads_over: the tensor-parallel group over which the normalised heads are spread, if they are.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads_over: Any = None
    ) -> None:
        super().__init__(config, torch.zeros(hidden_size, dtype=config.params_dtype), eps, heads_over)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D] in x's dtype; the sums are float32."""
        return rms_norm(x, self.whole_weight(), eps=self.eps, zero_centred=True)


class GatedNorm(_NormWeight):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), the delta net's output norm; its weight is float32.

    Args:
        config: Megatron's config.
        hidden_size: features of the last axis.
        eps: added to the mean square.
        heads_over: the tensor-parallel group over which the normalised heads are spread.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads_over: Any) -> None:
        weight = torch.ones(hidden_size, dtype=at_least_float32(config.params_dtype))
        super().__init__(config, weight, eps, heads_over)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., D] and a gate of the same shape -> [..., D] in x's dtype."""
        return gated_rms_norm(x, gate, self.whole_weight(), eps=self.eps)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)

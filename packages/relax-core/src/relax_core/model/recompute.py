"""Activation recompute of a piece of a layer."""

from collections.abc import Callable
from typing import cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule


def run(
    module: MegatronModule, piece: str, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """`function(*inputs)`, computed again in the backward pass if the config recomputes `piece`.

    Args:
        module: the layer that owns the piece; its config decides.
        piece: a name in `recompute_modules`, for instance "core_attn".
        function: a pure function of `inputs` and of the module's parameters.
        *inputs: tensors, at least one of which needs a gradient when gradients are on.
    """
    config = module.config
    selected = config.recompute_granularity == "selective" and piece in config.recompute_modules
    if selected and module.training and torch.is_grad_enabled():
        return cast(torch.Tensor, tensor_parallel.checkpoint(function, False, *inputs))
    return function(*inputs)

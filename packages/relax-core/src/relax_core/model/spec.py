"""Which module stands where: Megatron's specs of a layer and of the trunk."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from relax_core.model.attention import GatedAttention
from relax_core.model.config import LayerType, Qwen35Config
from relax_core.model.delta_net import GatedDeltaNet
from relax_core.model.mlp import SwigluMlp
from relax_core.model.moe import MixtureOfExperts, RoutedLayer
from relax_core.model.norm import RMSNorm

_MIXERS: dict[LayerType, type] = {"linear_attention": GatedDeltaNet, "full_attention": GatedAttention}


def layer_spec(model: Qwen35Config, layer_type: LayerType) -> ModuleSpec:
    """A layer: norm, token mixer, residual, norm, feed-forward, residual.

    Args:
        model: sizes.
        layer_type: which token mixer.
    """
    return ModuleSpec(
        module=RoutedLayer if model.experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=_MIXERS[layer_type], params={"model": model}),
            self_attn_bda=residual_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=MixtureOfExperts if model.experts else SwigluMlp,
            mlp_bda=residual_add,
        ),
    )


def trunk_spec(model: Qwen35Config, layers: range) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the final norm."""
    specs = {kind: layer_spec(model, kind) for kind in set(model.layer_types)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[model.layer_types[index]] for index in layers], layer_norm=RMSNorm
    )


def residual_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Megatron's place for bias, dropout and residual; there is neither bias nor dropout."""

    def add(
        output_and_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _dropout: Any
    ) -> torch.Tensor:
        return residual + output_and_bias[0]

    return add

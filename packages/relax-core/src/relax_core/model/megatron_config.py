"""Megatron's `TransformerConfig` for a Qwen3.5 model."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_core.device import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.context import choose_context
from relax_core.model.lora_config import LoraConfig

Recompute = Literal["none", "selective", "full"]
# Norms, the feed-forward's activation and the token mixers' cores are computed again; the large matrix
# products outside the feed-forward are not.
_SELECTIVE = ("layernorm", "core_attn", "mlp")


def megatron_config(
    model: Qwen35Config,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute,
    random_weights: bool,
    lora: LoraConfig | None = None,
) -> TransformerConfig:
    """What Megatron's own parts (block, layer, linears, schedules, optimizer) read.

    Args:
        model: sizes of the model.
        parallel: sizes of the parallel axes.
        dtype: of weights and activations, float32, bfloat16 or float64 (tests).
        recompute: see `build_model`.
        random_weights: whether weights are drawn; False leaves them unset for a checkpoint to fill.
        lora: adapters of projections; None, or of rank 0, is none.

    Raises:
        ValueError: the heads do not allow the way of context parallelism that was asked for.
    """
    options: dict[str, Any] = {}
    if recompute == "full":
        options = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective":
        options = {"recompute_granularity": "selective", "recompute_modules": list(_SELECTIVE)}
    if model.experts:
        options |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": model.ffn_size,
            "moe_shared_expert_intermediate_size": model.shared_ffn_size,
            "expert_tensor_parallel_size": parallel.expert_tensor,
        }
    init = _normal(model.init_std) if random_weights else _leave
    config = TransformerConfig(
        num_layers=model.num_layers,
        mtp_num_layers=model.mtp_layers or None,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend.local,
        transformer_impl="local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.pipeline_chunks if parallel.pipeline_chunks > 1 else None
        ),
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        # In an interleaved pipeline of two ranks both neighbours are the same rank: one batch of sends and
        # receives would mix up activations and gradients.
        overlap_p2p_comm=parallel.pipeline_chunks > 1,
        batch_p2p_comm=parallel.pipeline_chunks == 1,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        sequence_parallel=parallel.sequence,
        init_method=init,
        output_layer_init_method=init,
        embedding_init_method=init,
        # Layers differ in kind, so each has keys of its own in a checkpoint.
        hetereogenous_dist_checkpoint=True,
        **options,
    )
    choose_context(config, model, parallel)
    config.lora = lora if lora is not None and lora.rank else None
    return config


def _normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def init(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.normal_(weight, 0.0, std)

    return init


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight

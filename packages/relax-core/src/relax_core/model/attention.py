"""Gated full attention over packed samples.

Axes: T tokens, 1 (Megatron's batch axis), D hidden, G key/value heads of this rank, M query heads per
key/value head, H = G * M query heads, E features of a head, P = (2 M + 2) E fused features of a group.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import output_gate, rotary

from relax_core.model.config import Qwen35Config
from relax_core.model.context import context_attention, context_choice
from relax_core.model.norm import RMSNorm
from relax_core.model.packed import require_packed
from relax_core.model.recompute import run


class GatedAttention(MegatronModule):  # type: ignore[misc]
    """Grouped-query attention with normalised queries and keys, partial rotary angles and a sigmoid output
    gate.

    `linear_qkv` holds, for each key/value head g: [queries of g; gates of g; key g; value g]. The formula is
    that of Qwen3.5 in transformers (`Qwen3_5Attention`).

    Args:
        config: Megatron's config.
        layer_number: 1-based place of the layer in the whole trunk.
        model: sizes of the model.
        pg_collection: process groups.

    Raises:
        ValueError: the key/value heads cannot be spread over the tensor-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        model: Qwen35Config,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.context_way = context_choice(config).attention.way
        ranks = self.tp_group.size()
        if model.kv_heads % ranks:
            raise ValueError(
                f"{model.kv_heads} key/value heads cannot be split over {ranks} tensor-parallel ranks; "
                f"choose a tensor size that divides {model.kv_heads}"
            )
        self.kv_heads = model.kv_heads // ranks
        self.queries_per_kv = model.attention_heads // model.kv_heads
        self.head_dim = model.head_dim
        self.linear_qkv = ColumnParallelLinear(
            model.hidden_size,
            (2 * model.attention_heads + 2 * model.kv_heads) * model.head_dim,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=self.tp_group,
        )
        self.q_layernorm = RMSNorm(config, model.head_dim, model.norm_eps, heads_over=self.tp_group)
        self.k_layernorm = RMSNorm(config, model.head_dim, model.norm_eps, heads_over=self.tp_group)
        self.linear_proj = RowParallelLinear(
            model.attention_heads * model.head_dim,
            model.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_T1D: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias); each sample sees itself alone, causally."""
        layout, cos_TR, sin_TR = require_packed(packed_seq_params)
        fused_T1P, _bias = self.linear_qkv(hidden_T1D)

        def core(fused_T1P: torch.Tensor) -> torch.Tensor:
            tokens, heads, width = fused_T1P.shape[0], self.queries_per_kv, self.head_dim
            fused_TGP = fused_T1P.view(tokens, self.kv_heads, -1)
            q_TGP, gate_TGP, k_TGE, v_TGE = torch.split(
                fused_TGP, [heads * width, heads * width, width, width], dim=-1
            )
            q_THE = self.q_layernorm(q_TGP.reshape(tokens, -1, width))
            k_TGE = self.k_layernorm(k_TGE)
            q_THE, k_TGE = rotary(q_THE, cos_TR, sin_TR), rotary(k_TGE, cos_TR, sin_TR)
            o_THE = context_attention(q_THE, k_TGE, v_TGE, layout, way=self.context_way, group=self.cp_group)
            gated_THE = output_gate(o_THE, gate_TGP.reshape(tokens, -1, width))
            return gated_THE.view(tokens, 1, -1)

        out_T1D, _bias = self.linear_proj(run(self, "core_attn", core, fused_T1P))
        return out_T1D, None

"""Gated full attention over packed samples.

Axes: T tokens, 1 (Megatron's batch axis), D hidden, G key/value heads of this rank, M query heads per
key/value head, H = G * M query heads, E features of a head, N tensor-parallel ranks that share a key/value
head, S = E / N, P = 2 M E + 2 S fused features of a group.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import output_gate, rotary

from relax_core.model.config import Qwen35Config
from relax_core.model.context import context_attention, context_choice
from relax_core.model.fits import ranks_per_kv_head
from relax_core.model.linear import ColumnLinear, RowLinear
from relax_core.model.norm import RMSNorm
from relax_core.model.packed import require_packed
from relax_core.model.recompute import run
from relax_core.model.sharding import place_blocks, stored_rows


class GatedAttention(MegatronModule):  # type: ignore[misc]
    """Grouped-query attention with normalised queries and keys, partial rotary angles and a sigmoid output
    gate.

    `linear_qkv` holds, for each key/value head g: [queries of g; gates of g; key g; value g]. With n times as
    many tensor-parallel ranks as key/value heads, n ranks share one: each holds its share of g's query heads,
    of their gates, and an n-th of the features of key g and of value g, which they gather before use. So
    every row lies on exactly one rank: gradients, their norm and checkpoints need nothing special. The
    formula is that of Qwen3.5 in transformers (`Qwen3_5Attention`).

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
        self.sharing = ranks_per_kv_head(model, ranks)
        self.kv_heads = max(1, model.kv_heads // ranks)
        self.queries_per_kv = model.attention_heads // ranks // self.kv_heads
        self.head_dim = model.head_dim
        own, shared = self.queries_per_kv * self.head_dim, self.head_dim // self.sharing
        self.qkv_parts = {"q": own, "gate": own, "k": shared, "v": shared}
        self.linear_qkv = ColumnLinear(
            model.hidden_size,
            (2 * model.attention_heads + 2 * model.kv_heads) * model.head_dim,
            config=config,
            target="linear_qkv",
            init_method=config.init_method,
            tp_group=self.tp_group,
        )
        self.q_layernorm = RMSNorm(config, model.head_dim, model.norm_eps, heads_over=self.tp_group)
        self.k_layernorm = RMSNorm(config, model.head_dim, model.norm_eps, heads_over=self.tp_group)
        self.linear_proj = RowLinear(
            model.attention_heads * model.head_dim,
            model.hidden_size,
            config=config,
            target="linear_proj",
            init_method=config.output_layer_init_method,
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
            tokens, width = fused_T1P.shape[0], self.head_dim
            fused_TGP = fused_T1P.view(tokens, self.kv_heads, -1)
            q_TGP, gate_TGP, k_TGE, v_TGE = torch.split(fused_TGP, list(self.qkv_parts.values()), dim=-1)
            if self.sharing > 1:
                k_TGE, v_TGE = self._join_shares(k_TGE, v_TGE)
            q_THE = self.q_layernorm(q_TGP.reshape(tokens, -1, width))
            k_TGE = self.k_layernorm(k_TGE)
            q_THE, k_TGE = rotary(q_THE, cos_TR, sin_TR), rotary(k_TGE, cos_TR, sin_TR)
            o_THE = context_attention(q_THE, k_TGE, v_TGE, layout, way=self.context_way, group=self.cp_group)
            gated_THE = output_gate(o_THE, gate_TGP.reshape(tokens, -1, width))
            return gated_THE.view(tokens, 1, -1)

        out_T1D, _bias = self.linear_proj(run(self, "core_attn", core, fused_T1P))
        return out_T1D, None

    def _join_shares(self, k_T1S: torch.Tensor, v_T1S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole key and value head [T, 1, E] from the shares [T, 1, S] of the ranks that hold it.

        The backward pass sums what those ranks' queries ask of a share.
        """
        tokens, ranks = len(k_T1S), self.tp_group.size()
        shares_T2S = torch.cat([k_T1S, v_T1S], dim=1)
        everyone = gather_from_sequence_parallel_region(shares_T2S, group=self.tp_group)
        first = self.tp_group.rank() // self.sharing * self.sharing
        mine_NT2S = everyone.view(ranks, tokens, 2, -1)[first : first + self.sharing]
        k_T1E, v_T1E = mine_NT2S.permute(1, 2, 0, 3).reshape(tokens, 2, -1).split(1, dim=1)
        return k_T1E, v_T1E

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """`linear_qkv` is stored as one rank has it, so that any tensor-parallel size can read it."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.sharing > 1:
            heads = self.queries_per_kv * self.sharing
            places = shared_blocks(self.tp_group.rank(), sharing=self.sharing, heads=heads)
            whole = self.tp_group.size() * (2 * heads + 2)
            for key in stored_rows(state, f"{prefix}linear_qkv"):
                place_blocks(state, key, places, whole=whole)
        return state


def shared_blocks(rank: int, *, sharing: int, heads: int) -> list[int]:
    """Which blocks of E / N rows of the whole `linear_qkv` tensor-parallel rank `rank` holds, in its order.

    Args:
        rank: which one.
        sharing: N, ranks that share a key/value head.
        heads: query heads of a key/value head.
    """
    group, share = divmod(rank, sharing)
    side = heads * sharing
    queries = [share * heads + block for block in range(heads)]
    gates = [side + block for block in queries]
    key, value = 2 * side + share, 2 * side + sharing + share
    return [group * (2 * side + 2 * sharing) + block for block in (*queries, *gates, key, value)]

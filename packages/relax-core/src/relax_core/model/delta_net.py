"""Gated delta net over packed samples.

Axes: T tokens, 1 (Megatron's batch axis), D hidden, H key heads and U value heads of this rank, K key dim, V
value dim, C = 2 H K + U V convolved channels, W taps.
"""

from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

from relax_core.model.arriving import arrived
from relax_core.model.config import Qwen35Config
from relax_core.model.context import DeltaHeads, context_choice, context_delta
from relax_core.model.fits import check_delta_heads
from relax_core.model.linear import ColumnLinear, RowLinear
from relax_core.model.norm import GatedNorm, at_least_float32
from relax_core.model.packed import require_packed
from relax_core.model.recompute import run
from relax_core.model.sharding import split_rows, stored_rows
from relax_core.packing import PackedLayout


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Projections, causal convolution, gated delta rule, gated norm and output projection.

    `in_proj` holds, per tensor-parallel rank, [q; k; v; z; b; a]: queries, keys, values, output gate, step
    size and decay. The formula is that of Qwen3.5 in transformers (`Qwen3_5GatedDeltaNet`). `A_log`,
    `dt_bias` and the weight of `out_norm` are float32 whatever the model's dtype, so that checkpoints that
    store them so lose nothing.

    Args:
        config: Megatron's config.
        layer_number: 1-based place of the layer in the whole trunk.
        model: sizes of the model.
        pg_collection: process groups.

    Raises:
        ValueError: the key heads cannot be spread over the tensor-parallel ranks.
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
        self.context_way = context_choice(config).delta.way
        ranks = self.tp_group.size()
        check_delta_heads(model, ranks)
        self.key_shape = (model.delta_key_heads // ranks, model.delta_key_dim)
        self.value_shape = (model.delta_value_heads // ranks, model.delta_value_dim)
        keys, values = self.key_shape[0] * self.key_shape[1], self.value_shape[0] * self.value_shape[1]
        heads = self.value_shape[0]
        self.conv_parts = {"q": keys, "k": keys, "v": values}
        self.in_proj_parts = {**self.conv_parts, "z": values, "b": heads, "a": heads}
        self.in_proj = ColumnLinear(
            model.hidden_size,
            ranks * sum(self.in_proj_parts.values()),
            config=config,
            target="in_proj",
            init_method=config.init_method,
            tp_group=self.tp_group,
        )
        self.conv1d = _Weight(
            torch.empty(sum(self.conv_parts.values()), 1, model.conv_width, dtype=config.params_dtype)
        )
        self.A_log = torch.nn.Parameter(torch.empty(heads, dtype=at_least_float32(config.params_dtype)))
        self.dt_bias = torch.nn.Parameter(torch.ones_like(self.A_log))
        self.out_norm = GatedNorm(config, model.delta_value_dim, model.norm_eps, heads_over=self.tp_group)
        self.out_proj = RowLinear(
            model.delta_value_heads * model.delta_value_dim,
            model.hidden_size,
            config=config,
            target="out_proj",
            init_method=config.output_layer_init_method,
            tp_group=self.tp_group,
        )
        self._init_own_parameters()

    def _init_own_parameters(self) -> None:
        """Draws the convolution and the decay as transformers does: A uniform in (0, 16)."""
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        with torch.no_grad():
            self.config.init_method(self.conv1d.weight)
            torch.nn.init.uniform_(self.A_log, 1e-3, 16).log_()

    def forward(
        self,
        hidden_T1D: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias); state and convolution start afresh in each sample."""
        layout, _cos, _sin = require_packed(packed_seq_params)
        fused_T1P, _bias = self.in_proj(hidden_T1D)

        def core(fused_T1P: torch.Tensor) -> torch.Tensor:
            return self._mix(fused_T1P.squeeze(1), layout)

        mixed_T1P = run(self, "core_attn", core, fused_T1P)
        out_T1D, _bias = self.out_proj(mixed_T1P)
        return out_T1D, None

    def _mix(self, fused_TP: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Everything between the two projections: fused [T, P] -> [T, 1, U V]."""
        tokens = fused_TP.shape[0]
        conv, (values, heads) = sum(self.conv_parts.values()), (self.conv_parts["v"], self.value_shape[0])
        qkv_TC, z_TP, b_TU, a_TU = torch.split(fused_TP, [conv, values, heads, heads], dim=-1)
        taps_CW = arrived(self.conv1d).weight.squeeze(1)
        own = DeltaHeads(*self.key_shape, *self.value_shape, taps_CW, self.A_log, self.dt_bias)
        o_TUV = context_delta(qkv_TC, b_TU, a_TU, own, layout, way=self.context_way, group=self.cp_group)
        z_TUV = z_TP.reshape(tokens, *self.value_shape)
        return cast(torch.Tensor, self.out_norm(o_TUV, z_TUV)).view(tokens, 1, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Every component of `in_proj` and `conv1d` is a tensor of its own."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in ("A_log", "dt_bias")} | {
            "conv1d.weight": self.conv1d.weight
        }
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state |= make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        for key in stored_rows(state, f"{prefix}in_proj"):
            split_rows(state, key, self.in_proj_parts)
        split_rows(state, f"{prefix}conv1d.weight", self.conv_parts)
        return state


class _Weight(torch.nn.Module):
    """Holds one tensor under the name `weight`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

"""Multi-token prediction: draft layers that look further ahead than the trunk.

Axes: T tokens, 1 (Megatron's batch axis), D hidden.

Depth k (from 0) at position t joins the embedding of token t + 1 + k with the hidden state of the depth
before (the trunk's for k = 0) and predicts token t + 2 + k:

    x = eh_proj([enorm(embedding); hnorm(hidden)]);  hidden' = final_layernorm(transformer_layer(x))

The hidden state that enters is the one *after* the trunk's final norm, and what one depth hands to the next
is *after* its own final norm. All sources read join embedding first, hidden second, and take a full-attention
layer at the positions of the hidden state:
    vLLM: the target (`qwen3_next.py`, on which `qwen3_5.py` builds) returns what its final norm gives; the
        draft (`qwen3_5_mtp.py`) returns what `mtp.norm` gives, and takes that in its next step.
    SGLang: `qwen3_5_mtp.py` takes the `hidden_states` that the target's logits processor kept: those from
        which it computes logits.
    Megatron-core 0.16: `TransformerBlock` applies `final_layernorm` after the last layer also when MTP layers
        follow; `MultiTokenPredictionLayer` joins (embedding, hidden).
"""

from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_core.model.config import Qwen35Config
from relax_core.model.norm import RMSNorm
from relax_core.model.packed import PackedContext
from relax_core.model.spec import layer_spec


class DraftLayer(MegatronModule):  # type: ignore[misc]
    """One depth: two norms, the joining projection, a full-attention layer and a final norm."""

    def __init__(
        self,
        config: TransformerConfig,
        model: Qwen35Config,
        depth: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        size, eps = model.hidden_size, model.norm_eps
        self.enorm = RMSNorm(config, size, eps)
        self.hnorm = RMSNorm(config, size, eps)
        self.eh_proj = ColumnParallelLinear(
            2 * size,
            size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        self.transformer_layer = build_module(
            layer_spec(model, "full_attention"),
            config=config,
            layer_number=depth + 1,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.final_layernorm = RMSNorm(config, size, eps)

    def forward(
        self, embedding_T1D: torch.Tensor, hidden_T1D: torch.Tensor, context: PackedContext
    ) -> torch.Tensor:
        """The next depth's hidden state [T, 1, D]."""
        if not (self.training and self.config.recompute_granularity == "full" and torch.is_grad_enabled()):
            return self._forward(embedding_T1D, hidden_T1D, context)
        # Megatron's checkpoint gives no gradient at all when no input asks for one, as detached inputs do.
        hidden_T1D = hidden_T1D if hidden_T1D.requires_grad else hidden_T1D.detach().requires_grad_()
        recomputed = tensor_parallel.checkpoint(
            lambda embedding, hidden: self._forward(embedding, hidden, context),
            False,
            embedding_T1D,
            hidden_T1D,
        )
        return cast(torch.Tensor, recomputed)

    def _forward(
        self, embedding_T1D: torch.Tensor, hidden_T1D: torch.Tensor, context: PackedContext
    ) -> torch.Tensor:
        joined = torch.cat([self.enorm(embedding_T1D), self.hnorm(hidden_T1D)], dim=-1)
        x_T1D, _bias = self.eh_proj(joined)
        x_T1D = tensor_parallel.gather_from_tensor_model_parallel_region(x_T1D, group=self.tp_group)
        if self.config.sequence_parallel:
            x_T1D = tensor_parallel.scatter_to_sequence_parallel_region(x_T1D, group=self.tp_group)
        if torch.is_grad_enabled() and not x_T1D.requires_grad:
            # With adapters alone trained nothing before them asks for a gradient, which Megatron's recompute
            # of a layer's pieces needs of its input.
            x_T1D.requires_grad_()
        x_T1D, _context = self.transformer_layer(x_T1D, packed_seq_params=context)
        return cast(torch.Tensor, self.final_layernorm(x_T1D))


class MultiTokenPrediction(MegatronModule):  # type: ignore[misc]
    """Draft layers of every depth, each with its own weights; a single one may serve several depths.

    Args:
        config: Megatron's config.
        model: sizes; `mtp_layers` is the number of depths.
        pg_collection: process groups.
        vp_stage: the piece of the layers that they follow, where a rank holds several.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: Qwen35Config,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(
            DraftLayer(config, model, depth, pg_collection, vp_stage) for depth in range(model.mtp_layers)
        )

    def forward(
        self, embeddings_T1D: list[torch.Tensor], hidden_T1D: torch.Tensor, context: PackedContext
    ) -> list[torch.Tensor]:
        """The hidden state of every depth.

        Args:
            embeddings_T1D: per depth k, the embedding of the token k + 1 places ahead.
            hidden_T1D: the trunk's, after its final norm.
            context: segments and rotary angles.
        """
        hidden = []
        for depth, embedding_T1D in enumerate(embeddings_T1D):
            layer = self.layers[depth % len(self.layers)]
            hidden_T1D = layer(embedding_T1D, hidden_T1D, replace(context, ahead=depth + 1))
            hidden.append(hidden_T1D)
        return hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each depth under its own key."""
        state: dict[str, Any] = {}
        for depth, layer in enumerate(self.layers):
            layer = cast(DraftLayer, layer)
            state |= layer.sharded_state_dict(f"{prefix}layers.{depth}.", sharded_offsets, metadata)
        return state

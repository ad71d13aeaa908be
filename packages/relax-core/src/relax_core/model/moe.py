"""Mixture-of-experts feed-forward, and the transformer layer around it.

Axes: T tokens of this rank, 1 (Megatron's batch axis), D hidden, E experts, K experts of each token.
"""

from typing import Any, cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from relax_kernels import router_topk

from relax_core.model.balance import Place, RoutingPass
from relax_core.model.experts import Experts
from relax_core.model.packed import PackedContext
from relax_core.model.recompute import run
from relax_core.model.router import Router
from relax_core.model.shared_expert import SharedExpert


class MixtureOfExperts(MegatronModule):  # type: ignore[misc]
    """Routed experts, weighted by the router's normalised shares, plus the gated shared expert.

    The formula is that of Qwen3.5 in transformers (`Qwen3_5MoeSparseMoeBlock`).

    Args:
        config: Megatron's config; see `Router`, `Experts` and `SharedExpert`.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config)
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)
        self.place: Place = (0, 0)
        self.routing: RoutingPass | None = None

    def forward(self, hidden_T1D: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias)."""
        # Bound now: when this is computed again, other micro-batches and depths may have passed.
        routing, place = self.routing, self.place

        def feed_forward(hidden_T1D: torch.Tensor) -> torch.Tensor:
            x_TD = hidden_T1D.squeeze(1)
            logits_TE = self.router(x_TD)
            weight_TK, expert_TK = router_topk(logits_TE, top_k=self.config.moe_router_topk)
            if routing is not None:
                weight_TK = routing.record(place, logits_TE, expert_TK, weight_TK)
            started = self.experts.start(x_TD, expert_TK)
            # The device works on this while the host waits for the sizes of the exchange.
            shared_T1D, _bias = self.shared_experts(hidden_T1D)
            routed_TD = self.experts.finish(started, weight_TK)
            return cast(torch.Tensor, shared_T1D + routed_TD.unsqueeze(1))

        return run(self, "mlp", feed_forward, hidden_T1D), None


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A transformer layer whose feed-forward is a mixture of experts.

    Megatron hands a layer's context to its token mixer alone; this hands the routing record on as well.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The feed-forward does that itself, with the record of its own micro-batch.
        self.recompute_mlp = False

    def forward(self, *args: Any, **options: Any) -> Any:
        """Megatron's forward pass of a layer."""
        context = options.get("packed_seq_params")
        if isinstance(context, PackedContext):
            self.mlp.routing = context.routing
            # Behind the last pipeline stage, Megatron counts draft layers on from the trunk's.
            self.mlp.place = (context.ahead, context.ahead or self.layer_number)
        return super().forward(*args, **options)

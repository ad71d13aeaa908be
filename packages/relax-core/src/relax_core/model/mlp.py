"""SwiGLU feed-forward.

Axes: T tokens, 1 (Megatron's batch axis), D hidden, F features inside.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import swiglu

from relax_core.model.linear import ColumnLinear, RowLinear
from relax_core.model.sharding import split_rows, stored_rows


class SwigluMlp(MegatronModule):  # type: ignore[misc]
    """down(silu(gate(x)) * up(x)); `linear_fc1` holds [gate; up] of this rank's share of F.

    Args:
        config: Megatron's config; sizes are `hidden_size` and `ffn_hidden_size`.
        ffn_size: another size inside than `ffn_hidden_size`.
    """

    def __init__(self, config: TransformerConfig, *, ffn_size: int | None = None, **_: Any) -> None:
        super().__init__(config)
        self.tp_group = ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp
        ffn_size = ffn_size or config.ffn_hidden_size
        self.ffn_size = ffn_size // self.tp_group.size()
        self.linear_fc1 = ColumnLinear(
            config.hidden_size,
            2 * ffn_size,
            config=config,
            target="linear_fc1",
            init_method=config.init_method,
            stride=2,
            tp_group=self.tp_group,
        )
        self.linear_fc2 = RowLinear(
            ffn_size,
            config.hidden_size,
            config=config,
            target="linear_fc2",
            init_method=config.output_layer_init_method,
            tp_group=self.tp_group,
        )

    def forward(self, hidden_T1D: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, D] -> ([T, 1, D], no bias)."""
        gate_up_T12F, _bias = self.linear_fc1(hidden_T1D)
        out_T1D, _bias = self.linear_fc2(swiglu(gate_up_T12F))
        return out_T1D, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Gate and up rows are kept apart, so that any tensor-parallel size can read them."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        parts = {"gate": self.ffn_size, "up": self.ffn_size}
        for key in stored_rows(state, f"{prefix}linear_fc1"):
            split_rows(state, key, parts)
        return state

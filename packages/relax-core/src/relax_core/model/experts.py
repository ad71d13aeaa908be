"""The routed experts of one layer, spread over expert-parallel and expert-tensor ranks.

Axes: T tokens of this rank, K experts of each token, P = T * K rows sorted by expert, E experts of the whole
model, X experts of this rank, D hidden, F features inside an expert (of this rank's share).
"""

from typing import Any, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from relax_kernels import (
    Permutation,
    grouped_matmul,
    permute_tokens,
    sort_by_expert,
    swiglu,
    unpermute_tokens,
)

from relax_core.model.exchange import ExchangeSizes
from relax_core.model.fits import check_expert_features, check_experts, check_routing
from relax_core.model.linear import Adapted, lora_of
from relax_core.model.sharding import split_rows


class Experts(MegatronModule):  # type: ignore[misc]
    """sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    `linear_fc1.weight` is [X, 2 F, D] with the rows [gate; up] of each expert, `linear_fc2.weight` [X, D, F].
    Rank p of the expert-parallel ranks holds experts p * X to (p + 1) * X. Every rank of the dense layers
    must hold tokens of its own, which sequence parallelism sees to. The gradient of an expert is the sum over
    all tokens that reach it and is reduced over Megatron's expert-data-parallel group (`allreduce` is False).

    Args:
        config: Megatron's config; sizes are `num_moe_experts`, `moe_ffn_hidden_size` and `hidden_size`.

    Raises:
        ValueError: the experts or their features cannot be spread over the ranks, or the tensor-parallel
            ranks hold the same tokens.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "ep", "expt_tp", "tp_ep", "expt_dp"])
        self.groups = groups
        experts, ffn = config.num_moe_experts, config.moe_ffn_hidden_size
        _check_sizes(experts, ffn, groups, sequence=config.sequence_parallel)
        if lora_of(config, "experts") is not None and groups.expt_tp.size() > 1:
            raise ValueError(
                f"lora.targets has experts, whose features are cut over {groups.expt_tp.size()} ranks: set "
                "parallel.expert_tensor to 1, or leave experts out of lora.targets"
            )
        self.experts = experts
        self.ffn_size = ffn // groups.expt_tp.size()
        local = experts // groups.ep.size()
        self.linear_fc1 = _Weight(config, (local, 2 * self.ffn_size, config.hidden_size))
        self.linear_fc2 = _Weight(config, (local, config.hidden_size, self.ffn_size))
        set_tensor_model_parallel_attributes(self.linear_fc1.weight, True, 1, 2)
        set_tensor_model_parallel_attributes(self.linear_fc2.weight, True, 2, 1)
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            config.init_method(self.linear_fc1.weight)
            config.output_layer_init_method(self.linear_fc2.weight)

    @property
    def first(self) -> int:
        """Number, in the whole model, of this rank's first expert."""
        return int(self.groups.ep.rank()) * len(self.linear_fc1.weight)

    def start(self, x_TD: torch.Tensor, expert_TK: torch.Tensor) -> "Started":
        """Sorts the tokens by their experts (from `router_topk`) and asks the other ranks for sizes.

        Between this and `finish` the host should queue what does not depend on it.
        """
        order = sort_by_expert(expert_TK, experts=self.experts)
        sizes = None
        if self.groups.tp_ep.size() > 1:
            sizes = ExchangeSizes(order.count_E, self.groups.tp_ep, copies=self.groups.expt_tp.size())
        return Started(order, permute_tokens(x_TD, order), sizes)

    def finish(self, started: "Started", weight_TK: torch.Tensor) -> torch.Tensor:
        """The experts' results [T, D], with the weights of `router_topk`."""
        order, x_PD, sizes = started
        if sizes is None:
            y_PD = self._feed_forward(x_PD, order.count_E)
        else:
            exchange = sizes.read()
            y_PD = exchange.combine(self._feed_forward(exchange.dispatch(x_PD), exchange.count_X))
        return unpermute_tokens(y_PD, order, weight_TK)

    def _feed_forward(self, x_RD: torch.Tensor, count_X: torch.Tensor) -> torch.Tensor:
        gate_up_R2F = self.linear_fc1(x_RD, count_X)
        return cast(torch.Tensor, self.linear_fc2(swiglu(gate_up_R2F), count_X))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each weight as one tensor of all experts, gate and up apart: any layout reads it."""
        lead = len(sharded_offsets)
        place = (lead, self.groups.ep.rank(), self.groups.ep.size())
        state: dict[str, Any] = {}
        for name, weight, axis in (
            ("linear_fc1.weight", self.linear_fc1.weight, 1),
            ("linear_fc2.weight", self.linear_fc2.weight, 2),
        ):
            share = (lead + axis, self.groups.expt_tp.rank(), self.groups.expt_tp.size())
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                place,
                share,
                replica_id=(0, 0, self.groups.expt_dp.rank()),
                prepend_axis_num=lead,
            )
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            if linear.lora is not None:
                for key, tensor in (("lora_A", linear.lora_A), ("lora_B", linear.lora_B)):
                    state[f"{prefix}{name}.{key}"] = ShardedTensor.from_rank_offsets(
                        f"{prefix}{name}.{key}",
                        tensor,
                        *sharded_offsets,
                        place,
                        replica_id=(0, 0, self.groups.expt_dp.rank()),
                        prepend_axis_num=lead,
                    )
        parts = {"gate": self.ffn_size, "up": self.ffn_size}
        split_rows(state, f"{prefix}linear_fc1.weight", parts, axis=1)
        return state


class Started(NamedTuple):
    """Tokens on their way to their experts: their order, the rows [P, D], and the sizes where ranks share."""

    order: Permutation
    x_PD: torch.Tensor
    sizes: ExchangeSizes | None


class _Weight(torch.nn.Module, Adapted):
    """One matrix per expert of this rank, [X, out, in], and its adapter if the run asks for one."""

    def __init__(self, config: TransformerConfig, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.lora = lora_of(config, "experts")
        if self.lora is not None:
            experts, outputs, inputs = shape
            rank = self.lora.rank
            self.make_adapter((experts, rank, inputs), (experts, outputs, rank), config.params_dtype)
            # Whole on this rank and on no other of its replica: each counts in the norm of the gradient.
            set_tensor_model_parallel_attributes(self.lora_A, True, 1, 1)
            set_tensor_model_parallel_attributes(self.lora_B, True, 1, 1)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x_RI: torch.Tensor, count_X: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert through their expert's matrix: [R, in] -> [R, out]."""
        out_RO = grouped_matmul(x_RI, self.weight, count_X)
        if not self.has_adapter:
            return out_RO
        assert self.lora is not None
        inner_RR = grouped_matmul(self.dropped(x_RI, own=True), self.lora_A, count_X)
        return out_RO + self.lora.scale * grouped_matmul(inner_RR, self.lora_B, count_X)


def _check_sizes(experts: int, ffn: int, groups: ProcessGroupCollection, *, sequence: bool) -> None:
    check_routing(groups.tp.size(), sequence=sequence)
    check_experts(experts, groups.ep.size())
    check_expert_features(ffn, groups.expt_tp.size())

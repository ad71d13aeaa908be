"""Projections of the trunk over tensor-parallel ranks, with a low-rank adapter if the run asks for one.

Axes: T tokens, 1 (Megatron's batch axis), I inputs, O outputs, R rank of the adapter.

An adapter is B A with A [R, I] and B [O, R]. Where the outputs are spread over ranks, B is, and every rank
has the whole A; where the inputs are, A is, and every rank has the whole B. What travels between ranks is R
numbers a token.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from relax_core.model.lora_config import LoraConfig, Target


def lora_of(config: TransformerConfig, target: Target) -> LoraConfig | None:
    """The adapter of a projection; None if it has none."""
    lora: LoraConfig | None = getattr(config, "lora", None)
    return lora if lora is not None and target in lora.targets else None


def without_adapters(config: TransformerConfig) -> TransformerConfig:
    """The same config for layers that have none."""
    if config.lora is None:
        return config
    plain = copy(config)
    plain.lora = None
    return plain


_ADAPTER = re.compile(r"lora_[AB]\d*$")


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name, on a rank or in the whole model, is an adapter's."""
    return _ADAPTER.search(name) is not None


class Adapted:
    """What has an adapter: `lora_A` and `lora_B` beside `weight`, or None.

    Attributes:
        lora: settings; None without an adapter.
        adapting: False leaves the adapter out: the weight alone, which is the policy as it started.
    """

    lora: LoraConfig | None = None
    adapting: bool = True
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    training: bool

    def make_adapter(self, shape_A: Sequence[int], shape_B: Sequence[int], dtype: torch.dtype) -> None:
        """Room for both; B is 0, A is drawn by `draw_adapters`."""
        self.lora_A = torch.nn.Parameter(torch.zeros(*shape_A, dtype=dtype))
        self.lora_B = torch.nn.Parameter(torch.zeros(*shape_B, dtype=dtype))

    @property
    def has_adapter(self) -> bool:
        """Whether the adapter counts now."""
        return self.lora is not None and self.adapting

    def dropped(self, x: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Dropout of an adapter's inputs; `own` if tensor-parallel ranks hold different ones."""
        assert self.lora is not None
        if self.lora.dropout == 0 or not self.training:
            return x
        with get_cuda_rng_tracker().fork() if own else nullcontext():
            return F.dropout(x, self.lora.dropout)


class ColumnLinear(ColumnParallelLinear, Adapted):  # type: ignore[misc]
    """Outputs spread over ranks, no bias; arguments as Megatron's, and what the projection is called."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, target: Target, **options: Any) -> None:
        super().__init__(inputs, outputs, config=config, bias=False, **options)
        self.lora = lora_of(config, target)
        if self.lora is not None:
            rank, local = self.lora.rank, self.output_size_per_partition
            self.make_adapter((rank, inputs), (local, rank), config.params_dtype)
            self.lora_A.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(self.lora_B, True, 0, 1)

    def forward(self, x_T1I: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, I] -> ([T, 1, O of this rank], no bias)."""
        out_T1O, _bias = super().forward(x_T1I, *args, **options)
        if self.has_adapter:
            assert self.lora is not None
            sequence = self.sequence_parallel
            inner_T1R = F.linear(self.dropped(x_T1I, own=sequence), self.lora_A)
            # Each rank's outputs ask something else of the same numbers: the backward pass adds it up.
            inner_T1R = (
                gather_from_sequence_parallel_region(inner_T1R, group=self.tp_group)
                if sequence
                else copy_to_tensor_model_parallel_region(inner_T1R, group=self.tp_group)
            )
            out_T1O = out_T1O + self.lora.scale * F.linear(inner_T1R, self.lora_B)
        return out_T1O, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return _with_adapter(state, self, {"lora_B": 0}, prefix, sharded_offsets, metadata)


class RowLinear(RowParallelLinear, Adapted):  # type: ignore[misc]
    """Inputs spread over ranks, no bias; arguments as Megatron's, and what the projection is called."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, target: Target, **options: Any) -> None:
        super().__init__(
            inputs, outputs, config=config, bias=False, input_is_parallel=True, skip_bias_add=True, **options
        )
        self.lora = lora_of(config, target)
        if self.lora is not None:
            rank, local = self.lora.rank, self.input_size_per_partition
            self.make_adapter((rank, local), (outputs, rank), config.params_dtype)
            set_tensor_model_parallel_attributes(self.lora_A, True, 1, 1)
            self.lora_B.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_T1I: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[T, 1, I of this rank] -> ([T, 1, O], no bias)."""
        out_T1O, _bias = super().forward(x_T1I)
        if self.has_adapter:
            assert self.lora is not None
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            own = self.tp_group.size() > 1
            inner_T1R = F.linear(self.dropped(x_T1I, own=own), self.lora_A)
            inner_T1R = cast(torch.Tensor, reduce(inner_T1R, group=self.tp_group))
            out_T1O = out_T1O + self.lora.scale * F.linear(inner_T1R, self.lora_B)
        return out_T1O, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return _with_adapter(state, self, {"lora_A": 1}, prefix, sharded_offsets, metadata)


@contextmanager
def adapters_off(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block the models are what they were before any adapter was trained."""
    adapted = [module for model in models for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.adapting = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapting = True


def _with_adapter(
    state: dict[str, Any], module: Any, axes: dict[str, int], prefix: str, offsets: Any, metadata: Any
) -> dict[str, Any]:
    """`state` with the adapter, whose matrices are cut along `axes` or whole on every rank."""
    if module.lora is None:
        return state
    matrices = {"lora_A": module.lora_A, "lora_B": module.lora_B}
    groups = {"tp_group": module.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    adapter: dict[str, Any] = make_sharded_tensors_for_checkpoint(matrices, prefix, axes, offsets, **groups)
    return state | adapter


def merged(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale B A, added in float32 at least and given in the weight's dtype."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    return (weight_OI.to(dtype) + scale * (b_OR.to(dtype) @ a_RI.to(dtype))).to(weight_OI.dtype)

"""Megatron's distributed optimizer: the states of models of two dtypes, as ours in bf16."""

import functools
from types import ModuleType
from typing import Any

import torch

from relax_core.upstream.correction import Correction, Undo, replace_attribute

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_VERSIONS = ">=0.16.1,<0.17"
_TESTS = "packages/relax-core/tests/upstream/test_distributed_optimizer.py"


def _match_group_order(module: ModuleType) -> Undo:
    def make(build: Any) -> Any:
        @functools.wraps(build.__func__)
        def corrected(cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
            _index_map, group_ranges = build.__func__(cls, param_groups, gbuf_ranges)
            index_map: dict[Any, tuple[int, int]] = {}
            for group_index, group in enumerate(group_ranges):
                group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
                index_map |= {param: (group_index, order) for order, param in enumerate(group["params"])}
            return index_map, group_ranges

        return classmethod(corrected)

    return replace_attribute(module.DistributedOptimizer, "_build_optimizer_group_ranges", make)


GROUP_ORDER = Correction(
    name="distributed-optimizer-group-order",
    module=_MODULE,
    wrong="With float32 and bfloat16 parameters in one group, states are looked up in buffer order but lie "
    "float32 first: a checkpoint holds the state of other parameters, silently where the sizes agree.",
    versions=_VERSIONS,
    apply=_match_group_order,
    test=f"{_TESTS}::test_each_parameter_finds_its_own_state_among_two_dtypes",
    thread="https://github.com/NVIDIA/Megatron-LM/issues/2777",
)

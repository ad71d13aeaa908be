"""Megatron's distributed optimizer: four faults in its checkpoints.

Three concern torch's Adam, taken where neither Transformer Engine nor Apex is installed: upstream runs with
fused optimizers, whose step count lies in the parameter group, not in each state. One concerns models that
hold parameters of two dtypes, as ours does in bf16.
"""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch

from relax_core.upstream.correction import Correction, Undo, replace_attribute

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_VERSIONS = ">=0.16.1,<0.17"
_TESTS = "packages/relax-core/tests/upstream/test_distributed_optimizer.py"


def uses_torch_adam() -> bool:
    """Whether Megatron finds no fused optimizer and takes torch's."""
    return not any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))


def _fill_fresh_state(module: ModuleType) -> Undo:
    def make(state_dict: Any) -> Any:
        @functools.wraps(state_dict)
        def corrected(self: Any) -> Any:
            _allocate_adam_state(self.optimizer)
            return state_dict(self)

        return corrected

    return replace_attribute(module.DistributedOptimizer, "state_dict", make)


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives a torch Adam that took no step the state it would begin its first step with."""
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _keep_own_step(module: ModuleType) -> Undo:
    def make(set_states: Any) -> Any:
        @functools.wraps(set_states)
        def corrected(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
            group_index, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
            own = {"step": state["step"]} if "step" in state else {}
            set_states(self, model_param, {**own, **tensors})

        return corrected

    return replace_attribute(module.DistributedOptimizer, "_set_main_param_and_optimizer_states", make)


def _separate_steps(module: ModuleType) -> Undo:
    def make(load_state_dict: Any) -> Any:
        @functools.wraps(load_state_dict)
        def corrected(self: Any, state_dict: Any) -> None:
            load_state_dict(self, state_dict)
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()

        return corrected

    return replace_attribute(module.DistributedOptimizer, "load_state_dict", make)


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


FRESH_STATE = Correction(
    name="distributed-optimizer-fresh-state",
    module=_MODULE,
    wrong="An optimizer that took no step cannot give or load a state: it asserts that there is exactly one "
    "step count.",
    versions=_VERSIONS,
    apply=_fill_fresh_state,
    test=f"{_TESTS}::test_a_fresh_optimizer_can_be_asked_for_its_state",
    needed=uses_torch_adam,
)
OWN_STEP = Correction(
    name="distributed-optimizer-own-step",
    module=_MODULE,
    wrong="Loading a sharded state raises KeyError 'step': sharded checkpoints do not hold a step for each "
    "parameter.",
    versions=_VERSIONS,
    apply=_keep_own_step,
    test=f"{_TESTS}::test_a_sharded_checkpoint_loads",
    needed=uses_torch_adam,
)
SEPARATE_STEPS = Correction(
    name="distributed-optimizer-shared-step",
    module=_MODULE,
    wrong="After loading all parameters share one step tensor, which Adam advances once per parameter: every "
    "step after the first is silently wrong.",
    versions=_VERSIONS,
    apply=_separate_steps,
    test=f"{_TESTS}::test_training_goes_on_after_loading_as_if_uninterrupted",
    needed=uses_torch_adam,
)
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

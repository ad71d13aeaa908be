"""Faults planted for tests, by name in the environment variable RELAX_SGLANG_FAULTS; none by default.

Each is a real way in which an update went wrong in the field and was not noticed.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

VARIABLE = "RELAX_SGLANG_FAULTS"


def plant(models: Mapping[str, nn.Module]) -> None:
    """Break the models as the environment asks.

    Raises:
        ValueError: no such fault.
    """
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name not in FAULTS:
            raise ValueError(f"{VARIABLE} names {name!r}; there are {', '.join(FAULTS)}")
        FAULTS[name](models)


def frozen_conv_cache(models: Mapping[str, nn.Module]) -> None:
    """Every delta net computes with a copy of its convolution weight that no update reaches."""
    for module in models["target"].modules():
        rule: Any = module
        if isinstance(getattr(rule, "conv_weights", None), torch.Tensor):
            rule.conv_weights = rule.conv_weights.detach().clone()


def frozen_draft(models: Mapping[str, nn.Module]) -> None:
    """The draft ignores what it is given."""
    draft: Any = models["draft"]
    loads = draft.load_weights
    state = {"traced": False}

    def load_weights(weights: Any) -> Any:
        pairs = list(weights)
        # The first passes are the trace, one tensor at a time; an update brings many.
        state["traced"] = len(pairs) > 1
        return None if state["traced"] else loads(pairs)

    draft.load_weights = load_weights


def flipped_byte(models: Mapping[str, nn.Module]) -> None:
    """One bit of one weight is wrong after each load."""
    target: Any = models["target"]
    loads = target.load_weights

    def load_weights(weights: Any) -> Any:
        pairs = list(weights)
        result = loads(pairs)
        if len(pairs) > 1:
            target.model.norm.weight.data.view(torch.uint8)[0] ^= 1
        return result

    target.load_weights = load_weights


FAULTS: dict[str, Callable[[Mapping[str, nn.Module]], None]] = {
    function.__name__: function for function in (frozen_conv_cache, frozen_draft, flipped_byte)
}

"""Weights that are still arriving from other data-parallel ranks.

Megatron gathers updated weights while the next forward pass runs, and waits for those of a module in a hook
before that module's forward pass. Who reads a weight without that call must wait for it here. Between a
backward pass and its optimizer step there is nothing to wait for, and asking would take the old weights for
the new ones.
"""

from typing import TypeVar

import torch

M = TypeVar("M", bound=torch.nn.Module)


def arrived(module: M) -> M:
    """`module`, once its own parameters (not those of its children) are complete."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module


def all_arrived(model: torch.nn.Module) -> None:
    """Waits for every parameter of `model`."""
    for module in model.modules():
        arrived(module)

"""A model's weights under the names of the weight map.

Axes: X experts of this rank.
"""

from collections.abc import Iterator
from typing import cast

import torch

from relax_core.model.experts import Experts


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of this rank, detached, as the weight map calls it.

    These are the model's parameters, except that each expert's matrices come one by one: of a parameter
    `...experts.linear_fc1.weight` [X, out, in] the views `...experts.linear_fc1.weight<e>` [out, in], e
    counting through the experts of the whole model. Writing into a view writes into the model.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            owner = model.get_submodule(prefix.rpartition(".")[0])
            if isinstance(owner, Experts):
                for place, matrix in enumerate(parameter.detach()):
                    yield f"{name}{owner.first + place}", matrix
            else:
                yield name, cast(torch.Tensor, parameter.detach())

"""A weight update as a transaction: everything is checked and staged, then copied in place at once."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from relax_rollout.digest import tensor_digest
from relax_rollout.update_check import Served, UpdateCheck


class WeightUpdate:
    """Tensors collected for one version.

    Args:
        model: the serving model; untouched until :meth:`commit`.
        version: what the weights will be called.
        kept: names of weights that stay as they are.
    """

    def __init__(self, model: nn.Module, version: int, kept: Collection[str] = ()) -> None:
        self.version = version
        self._targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        served = {n: Served(tuple(t.shape), t.dtype, id(t)) for n, t in self._targets.items()}
        self._check = UpdateCheck(served, version, kept)
        self._staged: dict[str, Tensor] = {}

    @property
    def unused(self) -> set[str]:
        """Names that came and are not served with."""
        return self._check.unused

    def dtypes(self) -> dict[str, str]:
        """The weights that are served with, and in which dtype; a tied weight under each of its names."""
        return self._check.dtypes()

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        """Check and stage some tensors, cast to the weights' dtype; they are copied.

        Raises:
            WeightUpdateError: a name unknown or given before, a shape that differs, or a dtype that is not
                floating.
        """
        for given, tensor in bucket.items():
            name = self._check.accept(given, tensor)
            if name is not None:
                target = self._targets[name]
                self._staged[name] = torch.empty_like(target, requires_grad=False).copy_(tensor.detach())

    def check_complete(self) -> None:
        """Every weight came, under one of its names, and tied names agree.

        Raises:
            WeightUpdateError: otherwise.
        """
        self._check.check_complete(self._staged)

    def commit(self) -> dict[str, str]:
        """Copy everything into the model and digest what is there now; call after :meth:`check_complete`."""
        with torch.no_grad():
            for name, tensor in self._staged.items():
                self._targets[name].copy_(tensor)
        there = {name: self._check.given_as[name] for name in self._staged} | self._check.kept
        return {given: tensor_digest(self._targets[name]) for name, given in there.items()}

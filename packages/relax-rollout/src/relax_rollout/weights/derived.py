"""Tensors that a model computes from its parameters once and keeps: caches that an update leaves stale.

A module may hold, beside its parameters, a transposed convolution weight, a packed projection or a cast
copy. Every tensor attribute that shares no memory with a parameter or buffer is such a candidate. Known kinds
have a rule by which they are rebuilt and checked; an unknown one that did not change while a parameter of its
module, or of the module around it, did is reported by name.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from relax_rollout.digest import tensor_digest
from relax_rollout.weights.regions import named_tensors

log = logging.getLogger(__name__)

Rule = Callable[[nn.Module], Tensor]
"""Computes the derived tensor from the module's parameters."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A derived tensor: the module that holds it, by name, and the attribute."""

    module: str
    attribute: str

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


class DerivedTensors:
    """Those of one model.

    Args:
        model: is scanned at each call, as caches may appear after the first forward.
        rules: attribute name -> rule, for the kinds that are known.
    """

    def __init__(self, model: nn.Module, rules: Mapping[str, Rule] | None = None) -> None:
        self._model = model
        self._rules = dict(rules or {})
        self._before: dict[str, tuple[str, str]] = {}

    def rebuild(self) -> None:
        """Recompute every derived tensor that has a rule, in place."""
        for found, module, tensor in self._scan():
            if found.attribute in self._rules:
                with torch.no_grad():
                    tensor.copy_(self._rules[found.attribute](module))

    def remember(self) -> None:
        """Digest what is there before an update; :meth:`stale` compares with it."""
        self._before = {found.name: self._digests(found, tensor) for found, module, tensor in self._scan()}

    def stale(self) -> list[str]:
        """Names of the derived tensors that do not belong to the present parameters."""
        wrong = []
        for found, module, tensor in self._scan():
            rule = self._rules.get(found.attribute)
            if rule is not None:
                if tensor_digest(rule(module).to(tensor.dtype)) != tensor_digest(tensor):
                    wrong.append(found.name)
                continue
            before = self._before.get(found.name)
            now = self._digests(found, tensor)
            if before is not None and before[0] == now[0] and before[1] != now[1]:
                wrong.append(found.name)
        return wrong

    def digests(self) -> dict[str, str]:
        """Of every derived tensor."""
        return {found.name: tensor_digest(tensor) for found, _, tensor in self._scan()}

    def _around(self, name: str) -> nn.Module:
        """The module that has the one of this name in it; the model itself at the top."""
        return self._model.get_submodule(name.rpartition(".")[0])

    def _digests(self, found: Derived, tensor: Tensor) -> tuple[str, str]:
        parameters = [tensor_digest(p) for p in self._around(found.module).parameters()]
        return tensor_digest(tensor), "".join(parameters)

    def _scan(self) -> Iterator[tuple[Derived, nn.Module, Tensor]]:
        candidates = [
            (name, module, attribute, value)
            for name, module in self._model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        if not candidates:
            return
        known = {t.untyped_storage().data_ptr() for t in named_tensors(self._model).values()}
        for name, module, attribute, value in candidates:
            if next(self._around(name).parameters(), None) is None:
                continue
            if value.untyped_storage().data_ptr() not in known:
                yield Derived(name, attribute), module, value

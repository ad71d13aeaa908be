"""A weight update as a transaction: everything is checked and staged, then copied in place at once."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from relax_rollout.digest import tensor_digest
from relax_rollout.engine import WeightUpdateError

UNUSED_PREFIX = "mtp."
TEXT_PREFIX = "model.language_model."
"""Where vision-language checkpoints keep the text model, which transformers loads under ``model.``."""


class WeightUpdate:
    """Tensors collected for one version.

    Args:
        model: the serving model; untouched until :meth:`commit`.
        version: what the weights will be called.
    """

    def __init__(self, model: nn.Module, version: int) -> None:
        self.version = version
        self.unused: set[str] = set()
        self._targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._staged: dict[str, Tensor] = {}
        self._given_as: dict[str, str] = {}

    def dtypes(self) -> dict[str, str]:
        """The weights that are served with, and in which dtype; a tied weight under each of its names."""
        return {name: str(target.dtype).removeprefix("torch.") for name, target in self._targets.items()}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        """Check and stage some tensors, cast to the weights' dtype; they are copied.

        Raises:
            WeightUpdateError: a name unknown or given before, a shape that differs, or a dtype that is not
                floating.
        """
        for given, tensor in bucket.items():
            name = self._own_name(given)
            if name in self._staged or name in self.unused:
                raise WeightUpdateError(f"{given} was given twice in the update to version {self.version}")
            if name.startswith(UNUSED_PREFIX):
                self.unused.add(name)
                continue
            self._check(name, given, tensor)
            target = self._targets[name]
            self._staged[name] = torch.empty_like(target, requires_grad=False).copy_(tensor.detach())
            self._given_as[name] = given

    def _own_name(self, given: str) -> str:
        if given not in self._targets and given.startswith(TEXT_PREFIX):
            return "model." + given.removeprefix(TEXT_PREFIX)
        return given

    def _check(self, name: str, given: str, tensor: Tensor) -> None:
        target = self._targets.get(name)
        if target is None:
            raise WeightUpdateError(
                f"the model has no weight called {given}; it has {len(self._targets)}, for example "
                f"{next(iter(self._targets))} (send Hugging Face names; {UNUSED_PREFIX}* is not used)"
            )
        if tensor.shape != target.shape:
            raise WeightUpdateError(
                f"{given} has shape {list(tensor.shape)}; the model's is {list(target.shape)}"
            )
        if tensor.is_floating_point() != target.is_floating_point():
            raise WeightUpdateError(f"{given} has dtype {tensor.dtype}; the model's is {target.dtype}")

    def _tied_names(self) -> list[list[str]]:
        """Names of the weights, those that share one tensor (a tied head) together."""
        shared: dict[int, list[str]] = {}
        for name, target in self._targets.items():
            shared.setdefault(id(target), []).append(name)
        return list(shared.values())

    def check_complete(self) -> None:
        """Every weight came, under one of its names, and tied names agree.

        Raises:
            WeightUpdateError: otherwise.
        """
        missing = []
        for names in self._tied_names():
            given = [name for name in names if name in self._staged]
            if not given:
                missing.append(" or ".join(names))
            for other in given[1:]:
                if not torch.equal(self._staged[given[0]], self._staged[other]):
                    raise WeightUpdateError(
                        f"{given[0]} and {other} are tied in this model but differ in the update"
                    )
        if missing:
            raise WeightUpdateError(
                f"the update to version {self.version} lacks {len(missing)} of the model's weights, for "
                f"example {', '.join(missing[:5])}"
            )

    def commit(self) -> dict[str, str]:
        """Copy everything into the model and digest what is there now; call after :meth:`check_complete`."""
        with torch.no_grad():
            for name, tensor in self._staged.items():
                self._targets[name].copy_(tensor)
        return {self._given_as[name]: tensor_digest(self._targets[name]) for name in self._staged}

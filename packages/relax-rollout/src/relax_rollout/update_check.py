"""What every engine checks of a weight update before anything is touched."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_rollout.digest import tensor_digest
from relax_rollout.engine import WeightUpdateError

UNUSED_PREFIX = "mtp."
TEXT_PREFIX = "model.language_model."
"""Where vision-language checkpoints keep the text model, which a text-only one has under ``model.``."""


@dataclass(frozen=True, slots=True)
class Served:
    """A weight as an engine serves it.

    Args:
        shape: of the whole tensor.
        dtype: in which it is served.
        storage: names with the same storage are tied (a head that is the embedding).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: object


class UpdateCheck:
    """The names of one update: each known, of the right shape, given once, and in the end all of them.

    Args:
        served: the engine's weights by name.
        version: of the update, for the texts.
        kept: names of weights that stay as they are.

    Attributes:
        kept: the served ones of these, and the name that each was given by.
    """

    def __init__(self, served: Mapping[str, Served], version: int, kept: Collection[str] = ()) -> None:
        self.version = version
        self.unused: set[str] = set()
        self.given_as: dict[str, str] = {}
        self._served = served
        self.kept = {self._own_name(given): given for given in kept if self._own_name(given) in served}

    def dtypes(self) -> dict[str, str]:
        """In which dtype each weight is served; a tied weight under each of its names."""
        return {name: str(s.dtype).removeprefix("torch.") for name, s in self._served.items()}

    def is_alias(self, name: str) -> bool:
        """Whether a weight is another one's storage, by whose name it goes."""
        return self._served[name].storage in self._served and self._served[name].storage != name

    def accept(self, given: str, tensor: Tensor) -> str | None:
        """Check one tensor.

        Returns:
            the engine's name of it, or None if the engine does not use it.

        Raises:
            WeightUpdateError: a name unknown or given before, another shape, or a dtype that is not floating.
        """
        name = self._own_name(given)
        if name in self.kept:
            raise WeightUpdateError(f"{given} is to stay as it is in the update to version {self.version}")
        if name in self.given_as or name in self.unused:
            raise WeightUpdateError(f"{given} was given twice in the update to version {self.version}")
        if name.startswith(UNUSED_PREFIX) and name not in self._served:
            self.unused.add(name)
            return None
        served = self._served.get(name)
        if served is None:
            raise WeightUpdateError(
                f"the model has no weight called {given}; it has {len(self._served)}, for example "
                f"{next(iter(self._served))} (send Hugging Face names; {UNUSED_PREFIX}* is not used)"
            )
        if tuple(tensor.shape) != served.shape:
            raise WeightUpdateError(
                f"{given} has shape {list(tensor.shape)}; the model's is {list(served.shape)}"
            )
        if tensor.is_floating_point() != served.dtype.is_floating_point:
            raise WeightUpdateError(f"{given} has dtype {tensor.dtype}; the model's is {served.dtype}")
        self.given_as[name] = given
        return name

    def _own_name(self, given: str) -> str:
        if given in self._served:
            return given
        if given.startswith(TEXT_PREFIX):
            return "model." + given.removeprefix(TEXT_PREFIX)
        longer = TEXT_PREFIX + given.removeprefix("model.")
        return longer if given.startswith("model.") and longer in self._served else given

    def check_complete(self, staged: Mapping[str, Tensor | str]) -> None:
        """Every weight came, under one of its names, and tied names agree.

        Args:
            staged: what came by name: tensors, or the digests of those that did not pass through here.

        Raises:
            WeightUpdateError: otherwise.
        """
        tied: dict[object, list[str]] = {}
        for name, served in self._served.items():
            tied.setdefault(served.storage, []).append(name)
        missing = []
        for names in tied.values():
            given = [name for name in names if name in staged]
            if not given and not self.kept.keys() & set(names):
                missing.append(" or ".join(names))
            for other in given[1:]:
                if not _equal(staged[given[0]], staged[other]):
                    raise WeightUpdateError(
                        f"{given[0]} and {other} are tied in this model but differ in the update"
                    )
        if missing:
            raise WeightUpdateError(
                f"the update to version {self.version} lacks {len(missing)} of the model's weights, for "
                f"example {', '.join(missing[:5])}"
            )


def _equal(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    digests = (tensor_digest(each) if isinstance(each, Tensor) else each for each in (one, other))
    return next(digests) == next(digests)

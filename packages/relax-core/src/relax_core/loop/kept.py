"""`KeptWeights`: what a run never changes of its checkpoint, and engines therefore keep as they loaded it."""

from collections.abc import Mapping

import torch
from relax_bridge import Checkpoint
from relax_rollout import tensor_digest

from relax_core.model.settings import ModelSettings

TOWER = "model.visual."
"""Where checkpoints have the vision tower."""


class KeptWeights:
    """The vision tower of a checkpoint, unless it is trained.

    Args:
        source: the checkpoint that trainer and engine start from; one whose weights are drawn at random keeps
            nothing, as the engine has others.
        model: the run's settings.

    Attributes:
        names: Hugging Face names; empty where all weights travel.
    """

    def __init__(self, source: Checkpoint, model: ModelSettings) -> None:
        self._source = source
        self._digests: dict[str, str] = {}
        trained = model.vision == "trained"
        self.names = () if trained else tuple(n for n in source.names if n.startswith(TOWER))

    def digests(self, dtypes: Mapping[str, str]) -> dict[str, str]:
        """Name -> digest that an engine should give which serves these names in these dtypes."""
        for name in self.names:
            if name in dtypes and name not in self._digests:
                tensor = self._source.tensor(name)
                self._digests[name] = tensor_digest(tensor.to(getattr(torch, dtypes[name])))
        return {name: self._digests[name] for name in self.names if name in dtypes}

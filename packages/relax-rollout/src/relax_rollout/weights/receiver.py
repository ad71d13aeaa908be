"""The receiving side: stages buckets, then loads them into target and draft at once and says what is there.

It runs inside the engine's process, over any module with a ``load_weights``.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from relax_rollout.digest import tensor_digest
from relax_rollout.weights.bucket import Entry, bucket_bytes, views
from relax_rollout.weights.derived import DerivedTensors, Rule
from relax_rollout.weights.regions import Regions, trace

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class UpdateRefusedError(ValueError):
    """A call that does not fit the open update; nothing was changed."""


class Source(Protocol):
    """Where a bucket's bytes come from."""

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """The bytes, uint8 [nbytes]; they stay as they are until the update ends."""
        ...


class Loadable(Protocol):
    """A model that loads a checkpoint's tensors."""

    def load_weights(self, weights: Any) -> Any:
        """Take over (name, tensor) pairs, leaving aside names of other models."""
        ...


@dataclass(slots=True)
class _Model:
    name: str
    module: nn.Module
    regions: Regions
    derived: DerivedTensors


@dataclass(slots=True)
class Staged:
    """An update that is open."""

    update: str
    version: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buckets: dict[int, list[str]] = field(default_factory=dict)


class Receiver:
    """Weights of one engine process.

    Args:
        models: by name, "target" first; "draft" shares what its module shares.
        checkpoint: shape and dtype of every tensor of the checkpoint.
        device: where the models are.
        rules: how derived tensors are computed, by attribute name.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        checkpoint: Shapes,
        device: torch.device,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self.device = device
        self.version = 0
        self.last_result: dict[str, Any] | None = None
        self.staged: Staged | None = None
        self.shapes = dict(checkpoint)
        self._models = [
            _Model(
                name,
                module,
                trace(module, _loader(module), checkpoint, device),
                DerivedTensors(module, rules),
            )
            for name, module in models.items()
        ]

    def manifest(self) -> dict[str, Any]:
        """Name -> [dtype served in, shape, models that hold it] of every tensor of the checkpoint.

        A tensor that no model holds is there with an empty dtype.
        """
        described = {}
        for name, (shape, _) in self.shapes.items():
            holders = [model for model in self._models if name in model.regions.of]
            dtype = str(holders[0].regions.dtype(name)).removeprefix("torch.") if holders else ""
            described[name] = [dtype, list(shape), [model.name for model in holders]]
        return described

    def begin(self, update: str, version: int) -> None:
        """Open an update; one that was open is dropped. The same update again keeps what it has."""
        if self.staged is None or self.staged.update != update:
            self.staged = Staged(update, version)

    def receive(self, update: str, bucket: int, entries: Sequence[Entry], source: Source) -> dict[str, str]:
        """Stage a bucket; a bucket that came before (its acknowledgement was lost) is replaced.

        Returns:
            name -> digest of what arrived, for the entries that were sent with one.

        Raises:
            UpdateRefusedError: another update or none is open.
        """
        staged = self._open(update)
        nbytes = bucket_bytes(entries)
        arrived = dict(
            zip((e.name for e in entries), views(entries, source.fetch(nbytes, self.device)), strict=True)
        )
        for name in staged.buckets.get(bucket, ()):
            staged.tensors.pop(name, None)
        staged.tensors |= arrived
        staged.buckets[bucket] = list(arrived)
        return {e.name: tensor_digest(arrived[e.name]) for e in entries if e.digest is not None}

    def commit(self, update: str, buckets: int, names: Collection[str] | None = None) -> dict[str, Any]:
        """Load everything staged into every model, rebuild what is derived from it, and read it all back.

        Committing the same update again gives the same answer.

        Args:
            update: that is open.
            buckets: how many it has.
            names: tensors to read back; None reads all.

        Returns:
            "version"; "digests": name -> digest as served; "stale": names of derived tensors that do not
            belong to the new weights.

        Raises:
            UpdateRefusedError: a bucket is missing, or another update or none is open.
        """
        if self.last_result is not None and self.last_result["update"] == update:
            return self.last_result
        staged = self._open(update)
        missing = sorted(set(range(buckets)) - set(staged.buckets))
        if missing:
            raise UpdateRefusedError(f"update {update} lacks bucket {missing[0]} of {buckets}")
        for model in self._models:
            model.derived.remember()
        pairs = list(staged.tensors.items())
        for model in self._models:
            # A model is given only what it holds: some loaders refuse or log other names.
            _loader(model.module)([(n, t) for n, t in pairs if n in model.regions.of])
            model.derived.rebuild()
        self.version = staged.version
        digests: dict[str, str] = {}
        for name, tensor in pairs:
            if names is None or name in names:
                digests |= self._digest(name, tensor)
        stale = [f"{model.name}: {name}" for model in self._models for name in model.derived.stale()]
        self.last_result = {
            "update": update, "version": staged.version, "digests": digests, "stale": stale
        }  # fmt: skip
        self.staged = None
        return self.last_result

    def _digest(self, name: str, sent: Tensor) -> dict[str, str]:
        """Of a tensor as served; if models hold different values, of the one that is not what was sent."""
        found: dict[str, str] = {}
        for model in self._models:
            if name not in model.regions.of:
                continue
            wanted = tensor_digest(sent.to(model.regions.dtype(name)))
            held = tensor_digest(model.regions.read_back(name, sent))
            if name not in found or held != wanted:
                found[name] = held
        return found

    def discard(self) -> None:
        """Drop the open update."""
        self.staged = None

    def _open(self, update: str) -> Staged:
        if self.staged is None or self.staged.update != update:
            there = "none" if self.staged is None else self.staged.update
            raise UpdateRefusedError(f"update {update} is not open here; open is: {there}")
        return self.staged


def _loader(module: nn.Module) -> Any:
    loadable: Any = module
    return loadable.load_weights

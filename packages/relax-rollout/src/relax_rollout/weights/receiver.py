"""The receiving side: stages buckets, then loads them into target and draft at once and says what is there.

It runs inside the engine's process, over any module with a ``load_weights``.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from relax_rollout.digest import tensor_digest, tensor_digests
from relax_rollout.weights.bucket import Bucket, Entry, views
from relax_rollout.weights.derived import DerivedTensors, Rule
from relax_rollout.weights.regions import Regions, changed, copy_all, trace

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class UpdateRefusedError(ValueError):
    """A call that does not fit the open update; nothing was changed."""


class ShareRefusedError(UpdateRefusedError):
    """A rank's share does not hold what the model keeps on this rank; send whole tensors."""


class Source(Protocol):
    """Where a bucket's bytes come from; ``stays`` tells that the next update may come in the same memory."""

    stays: bool

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
    stays: bool = True


class Receiver:
    """Weights of one engine process.

    Args:
        models: by name, "target" first; "draft" shares what its module shares.
        checkpoint: shape and dtype of every tensor of the checkpoint.
        device: where the models are.
        rules: how derived tensors are computed, by attribute name.
        replay: do the copies that the loader was seen to do, all at once, instead of calling it for each
            update.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        checkpoint: Shapes,
        device: torch.device,
        rules: Mapping[str, Rule] | None = None,
        *,
        replay: bool = False,
    ) -> None:
        self.device = device
        self.replay = replay
        self._known: dict[int, tuple[Tensor, Sequence[Entry], dict[str, Tensor]]] = {}
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

    def receive(self, update: str, place: int, bucket: Bucket, source: Source) -> dict[str, str]:
        """Stage a bucket; one that came before (its acknowledgement was lost) is replaced.

        A broadcast comes once: asked for it again, what came is told again.

        Args:
            update: that is open.
            place: of the bucket in it.
            bucket: what is in it.
            source: its bytes.

        Returns:
            name -> digest of what arrived, for the entries that were sent with one.

        Raises:
            UpdateRefusedError: another update or none is open.
        """
        staged = self._open(update)
        entries = bucket.entries
        refused: dict[str, str] = {}
        for model in self._models:
            refused |= model.regions.take(entries)
        if refused:
            why = next(iter(refused.values()))
            raise ShareRefusedError(f"shares that are not enough: {', '.join(refused)}; the first: {why}")
        if bucket.lasts or place not in staged.buckets:
            buffer = source.fetch(bucket.nbytes, self.device)
            arrived = self._views(place, entries, buffer, source.stays)
            staged.stays = staged.stays and source.stays
            for name in staged.buckets.get(place, ()):
                staged.tensors.pop(name, None)
            staged.tensors |= arrived
            staged.buckets[place] = list(arrived)
        arrived = {entry.name: staged.tensors[entry.name] for entry in entries}
        return self._digests_here({e.name: arrived[e.name] for e in entries if e.digest is not None})

    def _views(self, place: int, entries: Sequence[Entry], buffer: Tensor, stays: bool) -> dict[str, Tensor]:
        """The tensors of a bucket; the same objects as last time if it is that list in that memory."""
        known = self._known.get(place)
        if known is not None and known[0] is buffer and known[1] is entries:
            return known[2]
        found = dict(zip((e.name for e in entries), views(entries, buffer), strict=True))
        if stays:
            self._known[place] = buffer, entries, found
        return found

    def commit(
        self,
        update: str,
        buckets: int,
        names: Collection[str] | None = None,
        *,
        kept: Collection[str] = (),
        stored: Callable[[str], Tensor] | None = None,
    ) -> dict[str, Any]:
        """Load everything staged into every model, rebuild what is derived from it, and read it all back.

        Committing the same update again gives the same answer.

        Args:
            update: that is open.
            buckets: how many it has.
            names: tensors to read back; None reads all.
            kept: tensors that stay as they are, read back too.
            stored: gives such a tensor as the checkpoint has it, by its name.

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
        self._load(staged.tensors)
        for model in self._models:
            model.derived.rebuild()
        self.version = staged.version
        asked = {n: t for n, t in staged.tensors.items() if names is None or n in names}
        digests = self._digests(asked)
        for name in kept:
            assert stored is not None, "kept tensors are compared with those of the checkpoint"
            digests |= self._digests({name: stored(name).to(self.device)})
        stale = [f"{model.name}: {name}" for model in self._models for name in model.derived.stale()]
        self.last_result = {
            "update": update, "version": staged.version, "digests": digests, "stale": stale
        }  # fmt: skip
        if not staged.stays:
            for model in self._models:
                model.regions.forget()
        self.staged = None
        return self.last_result

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        # A model is given only what it holds: some loaders refuse or log other names.
        # What a loader expects is whole; shares go where it was seen to put their parts.
        if not self.replay:
            for model in self._models:
                whole = {n: t for n, t in _held(model, tensors).items() if n not in model.regions.shares}
                if whole:
                    _loader(model.module)(list(whole.items()))
        pairs = [
            model.regions.pairs(
                {n: t for n, t in _held(model, tensors).items() if self.replay or n in model.regions.shares}
            )
            for model in self._models
        ]
        copy_all(pair for found in pairs for parts in found.values() for pair in parts)

    def _digests(self, sent: Mapping[str, Tensor]) -> dict[str, str]:
        """Of tensors as served; where models hold different values, of the one that is not what was sent."""
        found: dict[str, str] = {}
        for model in self._models:
            held = _held(model, sent)
            pairs = model.regions.pairs(held)
            for name in changed(pairs):
                found[name] = tensor_digest(model.regions.read_back(name, held[name]))
            right = {n: t.to(pairs[n][0][0].dtype) for n, t in held.items() if n not in found}
            found |= self._digests_here(right)
        return found

    def _digests_here(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Digests made on the models' device; of tensors in the host's memory one at a time, so that it has
        room for them."""
        found = tensor_digests({name: t for name, t in tensors.items() if t.device.type == self.device.type})
        for name, tensor in tensors.items():
            if name not in found:
                found[name] = tensor_digest(tensor.to(self.device))
        return {name: found[name] for name in tensors}

    def discard(self) -> None:
        """Drop the open update."""
        self.staged = None
        for model in self._models:
            model.regions.forget()

    def _open(self, update: str) -> Staged:
        if self.staged is None or self.staged.update != update:
            there = "none" if self.staged is None else self.staged.update
            raise UpdateRefusedError(f"update {update} is not open here; open is: {there}")
        return self.staged


def _held(model: _Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in model.regions.of}


def _loader(module: nn.Module) -> Any:
    loadable: Any = module
    return loadable.load_weights

"""The receiving side: stages buckets, then loads them into target and draft at once and says what is there.

It runs inside the engine's process, over any module with a ``load_weights``.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from relax_rollout.weights.bucket import Bucket, Entry
from relax_rollout.weights.derived import DerivedTensors, Rule
from relax_rollout.weights.loading import Loading, Model, ServedDigests, Staged, loader
from relax_rollout.weights.regions import addresses, trace

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
class OpenUpdate:
    """An update that is open, and its buckets by their places in it."""

    update: str
    version: int
    buckets: dict[int, Staged] = field(default_factory=dict)


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
        replay: bool = True,
    ) -> None:
        self.device = device
        self.replay = replay
        self.version = 0
        self.last_result: dict[str, Any] | None = None
        self.staged: OpenUpdate | None = None
        self.shapes = dict(checkpoint)
        # Those of the last update that may come in the same memory again, and how they were loaded.
        self._known: dict[int, Staged] = {}
        self._loading: tuple[list[list[int]], Loading] | None = None
        self._models = [
            Model(
                name,
                module,
                trace(module, loader(module), checkpoint, device),
                DerivedTensors(module, rules),
            )
            for name, module in models.items()
        ]

    def manifest(self) -> dict[str, Any]:
        """Name -> [dtype served in, shape, models that hold it] of every tensor of the checkpoint.

        A tensor that no model holds is there with an empty dtype.
        """
        dtypes = {model.name: model.regions.dtypes() for model in self._models}
        described = {}
        for name, (shape, _) in self.shapes.items():
            holders = [model for model, held in dtypes.items() if name in held]
            dtype = str(dtypes[holders[0]][name]).removeprefix("torch.") if holders else ""
            described[name] = [dtype, list(shape), holders]
        return described

    def begin(self, update: str, version: int) -> None:
        """Open an update; one that was open is dropped. The same update again keeps what it has."""
        if self.staged is None or self.staged.update != update:
            self.staged = OpenUpdate(update, version)

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
        if bucket.lasts or place not in staged.buckets:
            known = self._known.get(place)
            if known is None or known.entries != bucket.entries:
                known = None
                self._refuse_short(bucket.entries)
            buffer = source.fetch(bucket.nbytes, self.device)
            if known is None or known.buffer is not buffer:
                known = Staged(bucket.entries, buffer, self.device)
            staged.buckets[place] = known
            if source.stays:
                self._known[place] = known
        if not any(entry.digest for entry in bucket.entries):
            return {}
        received = staged.buckets[place].digests()
        return {entry.name: received[entry.name] for entry in bucket.entries if entry.digest is not None}

    def _refuse_short(self, entries: Sequence[Entry]) -> None:
        shares = {entry.name: entry.share for entry in entries if entry.share is not None}
        refused = {n: why for model in self._models for n, why in model.regions.refused(shares).items()}
        if refused:
            why = next(iter(refused.values()))
            raise ShareRefusedError(f"shares that are not enough: {', '.join(refused)}; the first: {why}")

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
        loading = self._loading_of([staged.buckets[place] for place in range(buckets)])
        for model in self._models:
            model.derived.remember()
        loading.load(replay=self.replay)
        for model in self._models:
            model.derived.rebuild()
        self.version = staged.version
        digests = loading.served(names)
        for name in kept:
            assert stored is not None, "kept tensors are compared with those of the checkpoint"
            digests |= ServedDigests(self._models, {name: stored(name).to(self.device)}, self.device)()
        stale = [f"{model.name}: {name}" for model in self._models for name in model.derived.stale()]
        self.last_result = {
            "update": update, "version": staged.version, "digests": digests, "stale": stale
        }  # fmt: skip
        self.staged = None
        if any(bucket not in self._known.values() for bucket in loading.buckets):
            self._forget()
        return self.last_result

    def _loading_of(self, buckets: Sequence[Staged]) -> Loading:
        """The last one, if it was of the same buckets and nothing of the models has moved since."""
        places = [addresses(model.module) for model in self._models]
        if self._loading is None or self._loading[0] != places or self._loading[1].buckets != tuple(buckets):
            self._loading = places, Loading(self._models, buckets, self.device)
        return self._loading[1]

    def _forget(self) -> None:
        """Let go of what came in memory that does not stay."""
        self._loading = None
        self._known.clear()

    def discard(self) -> None:
        """Drop the open update."""
        self.staged = None
        self._forget()

    def _open(self, update: str) -> OpenUpdate:
        if self.staged is None or self.staged.update != update:
            there = "none" if self.staged is None else self.staged.update
            raise UpdateRefusedError(f"update {update} is not open here; open is: {there}")
        return self.staged

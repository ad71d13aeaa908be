"""Loading staged buckets into models: worked out once, done again as long as nothing moves."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relax_rollout.digest import TensorDigests, tensor_digest, tensor_digests
from relax_rollout.weights.bucket import Entry, Share, views
from relax_rollout.weights.derived import DerivedTensors
from relax_rollout.weights.recorded import Recorded
from relax_rollout.weights.regions import Pair, Regions, changed, copy_all, read_back


@dataclass(frozen=True, slots=True)
class Model:
    """One that takes weights: the regions of its module, and what it computes from its parameters."""

    name: str
    module: nn.Module
    regions: Regions
    derived: DerivedTensors


class Staged:
    """A bucket where it lies.

    Args:
        entries: what is where in it.
        buffer: its bytes, uint8.
        device: of the models.
    """

    def __init__(self, entries: Sequence[Entry], buffer: Tensor, device: torch.device) -> None:
        self.entries, self.buffer, self._device = tuple(entries), buffer, device
        self.tensors = dict(zip((e.name for e in entries), views(entries, buffer), strict=True))
        self.shares = {e.name: e.share for e in entries if e.share is not None}
        self._digests = TensorDigests(self.tensors)

    def digests(self) -> dict[str, str]:
        """Of its tensors as they are now."""
        if self.buffer.device.type == self._device.type:
            return self._digests()
        return digests_on(self._device, self.tensors)


class Loading:
    """What an update does to models whose tensors come in these buckets.

    Args:
        models: that are loaded.
        buckets: all of an update, each name in one of them.
        device: of the models.
    """

    def __init__(self, models: Sequence[Model], buckets: Sequence[Staged], device: torch.device) -> None:
        self._models = models
        self.buckets = tuple(buckets)
        self._tensors = {name: tensor for bucket in buckets for name, tensor in bucket.tensors.items()}
        self._shares = {name: share for bucket in buckets for name, share in bucket.shares.items()}
        pairs = [model.regions.pairs(self._tensors, self._shares) for model in models]
        parts = [pair for found in pairs for each in found.values() for pair in each]
        shared = [pair for found in pairs for n, each in found.items() if n in self._shares for pair in each]
        self._device = device
        self._copies = Recorded(device, lambda: copy_all(parts))
        self._shared_copies = Recorded(device, lambda: copy_all(shared))
        self._served: ServedDigests | None = None

    def load(self, *, replay: bool) -> None:
        """Load it into every model.

        Args:
            replay: by the copies that the models' loaders were seen to do; else by the loaders, which expect
                whole tensors, so that shares go where the loaders were seen to put their parts.
        """
        if replay:
            self._copies()
            return
        for model in self._models:
            # A model is given only what it holds: some loaders refuse or log other names.
            whole = [
                (n, t) for n, t in self._tensors.items() if n in model.regions.of and n not in self._shares
            ]
            if whole:
                loader(model.module)(whole)
        self._shared_copies()

    def served(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Name -> digest as the models serve it, of these names or of all; see :class:`ServedDigests`."""
        if names is not None:
            asked = {name: tensor for name, tensor in self._tensors.items() if name in names}
            return ServedDigests(self._models, asked, self._device, self._shares)()
        self._served = self._served or ServedDigests(self._models, self._tensors, self._device, self._shares)
        return self._served()


class ServedDigests:
    """Digests of tensors as models hold them; where two hold different ones, of one that was not sent so.

    Args:
        models: that hold them.
        sent: as they were sent, contiguous.
        device: of the models.
        shares: which part of a whole those are that are one.
    """

    def __init__(
        self,
        models: Sequence[Model],
        sent: Mapping[str, Tensor],
        device: torch.device,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        self._sent, self._device = sent, device
        # What lies in a model as it was sent is digested there; of the rest the parts are compared.
        self._whole: dict[str, Tensor] = {}
        self._names: list[tuple[str, str]] = []
        self._parts: list[dict[str, list[Pair]]] = []
        for model in models:
            parts: dict[str, list[Pair]] = {}
            for name, pairs in model.regions.pairs(sent, shares).items():
                for now, wanted in pairs:
                    if now.is_contiguous() and wanted.is_contiguous() and now.numel() == sent[name].numel():
                        # What models share is read once.
                        key = f"{name} at {now.data_ptr()}"
                        self._whole[key] = now.view(sent[name].shape)
                        self._names.append((key, name))
                    else:
                        parts.setdefault(name, []).append((now, wanted))
            self._parts.append(parts)
        self._digests = TensorDigests(self._whole)

    def __call__(self) -> dict[str, str]:
        """As they are now."""
        digests = self._digests()
        found: dict[str, list[tuple[str, torch.dtype]]] = {}
        for key, name in self._names:
            found.setdefault(name, []).append((digests[key], self._whole[key].dtype))
        for parts in self._parts:
            wrong = changed(parts)
            held = {
                name: read_back(self._sent[name], pairs)
                if name in wrong
                else self._sent[name].to(pairs[0][0].dtype)
                for name, pairs in parts.items()
            }
            for name, digest in digests_on(self._device, held).items():
                found.setdefault(name, []).append((digest, held[name].dtype))
        return {name: self._wrong_one(name, each) for name, each in found.items()}

    def _wrong_one(self, name: str, digests: list[tuple[str, torch.dtype]]) -> str:
        first, _ = digests[0]
        if len(set(digests)) == 1:
            return first
        sent = self._sent[name]
        return next((d for d, dtype in digests if d != tensor_digest(sent.to(dtype))), first)


def digests_on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests made on a device; of tensors in the host's memory one by one, so that it has room for them."""
    found = tensor_digests({name: t for name, t in tensors.items() if t.device.type == device.type})
    for name, tensor in tensors.items():
        if name not in found:
            found[name] = tensor_digest(tensor.to(device))
    return found


def loader(module: nn.Module) -> Any:
    """What loads a checkpoint's (name, tensor) pairs into a model."""
    loadable: Any = module
    return loadable.load_weights

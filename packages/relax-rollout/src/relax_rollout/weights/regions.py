"""Which bytes of which parameters a model's own loader writes for each tensor of its checkpoint.

A model may fuse, split or shard what it loads (query, key and value in one matrix, half of the heads on this
rank). Instead of knowing how, we watch its ``load_weights`` once: copies out of a probe tensor are noted and
not done. From then on any loaded tensor can be read back from where the model keeps it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from relax_rollout.weights.bucket import Share

SMALL_BYTES = 2**22
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class View:
    """A place in a storage: element offset, sizes, strides."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """That of a tensor."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def on(self, tensor: Tensor) -> Tensor:
        """The same place in a tensor's storage."""
        return torch.as_strided(tensor, self.size, self.stride, self.offset)

    def of_share(self, share: Share, whole: tuple[int, ...]) -> "View":
        """The same place of a contiguous whole tensor in a share of it.

        Args:
            share: which part of the whole is there.
            whole: shape of the whole.

        Raises:
            LookupError: some of it is not in the share, or lies in it otherwise than in the whole.
        """
        axis, row = share.axis, prod(whole[share.axis + 1 :])
        step, size = row * whole[axis], sum(each for _, each in share.ranges)
        if size == whole[axis]:
            return self
        dims = [(n, stride) for n, stride in zip(self.size, self.stride, strict=True) if n > 1]
        along = [n for n, stride in dims if stride == row]
        inside = self.offset % row + sum((n - 1) * stride for n, stride in dims if stride < row)
        if len(along) > 1 or inside >= row or any(s > row and s % step for _, s in dims):
            raise LookupError("it is read in another order than it was cut")
        first, count, before = self.offset // row % whole[axis], prod(along), 0
        for start, length in share.ranges:
            if start <= first and first + count <= start + length:
                break
            before += length
        else:
            raise LookupError(f"places {first} to {first + count} of axis {axis} are not in it")
        outer = self.offset // step
        offset = (outer * size + before + first - start) * row + self.offset % row
        stride = tuple(s // step * row * size if s > row else s for s in self.stride)
        return View(offset, self.size, stride)

    def within(self, tensor: Tensor) -> Tensor:
        """The same place in a contiguous tensor, which may lie anywhere in its storage."""
        return torch.as_strided(tensor, self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a checkpoint's tensor and the parameter that holds it.

    Args:
        source: in the checkpoint's tensor, which is contiguous.
        parameter: the parameter (or buffer), by its name in the model.
        target: in the parameter's storage.
    """

    source: View
    parameter: str
    target: View


Pair = tuple[Tensor, Tensor]
"""A place in a model, and what was sent for it."""


@dataclass(slots=True)
class Regions:
    """Of one model: the regions of each checkpoint name; a name without any is not loaded by the model."""

    model: nn.Module
    of: dict[str, list[Region]] = field(default_factory=dict)

    def dtypes(self) -> dict[str, torch.dtype]:
        """In which dtype the model keeps each of the checkpoint's tensors."""
        named = named_tensors(self.model)
        return {name: named[regions[0].parameter].dtype for name, regions in self.of.items()}

    def pairs(
        self, tensors: Mapping[str, Tensor], shares: Mapping[str, Share] | None = None
    ) -> dict[str, list[Pair]]:
        """Where the model keeps what it has of these tensors, and what of each belongs there, part by part.

        Args:
            tensors: contiguous, by name.
            shares: which part of a whole those are that are one.

        Raises:
            LookupError: see :meth:`View.of_share`.
        """
        named = named_tensors(self.model)
        found = {}
        for name, tensor in tensors.items():
            if name in self.of:
                sources = self._sources(name, (shares or {}).get(name))
                found[name] = [
                    (region.target.on(named[region.parameter].detach()), source.within(tensor.detach()))
                    for region, source in zip(self.of[name], sources, strict=True)
                ]
        return found

    def _sources(self, name: str, share: Share | None) -> list[View]:
        regions = [region.source for region in self.of[name]]
        return regions if share is None else [source.of_share(share, share.shape) for source in regions]

    def refused(self, shares: Mapping[str, Share]) -> dict[str, str]:
        """Name -> why its share is not enough, where the model keeps some of a tensor that is not in it."""
        found = {}
        for name, share in shares.items():
            try:
                self._sources(name, share) if name in self.of else None
            except LookupError as error:
                found[name] = str(error)
        return found


def read_back(sent: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """A tensor as a model holds it.

    Args:
        sent: as it was sent, contiguous, any dtype; parts that live on other ranks are taken from it.
        pairs: of it.

    Returns:
        in the model's dtype; equal to ``sent`` cast to it if and only if every copy that the model holds is.
    """
    held = sent.detach().to(pairs[0][0].dtype).clone()
    for now, wanted in pairs:
        if not torch.equal(bits(now), bits(wanted.to(now.device, now.dtype))):
            place = wanted.storage_offset() - sent.storage_offset()
            torch.as_strided(held, wanted.shape, wanted.stride(), place).copy_(now)
    return held


def changed(pairs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Names of which the model holds other bits than were sent, found with one wait for the device."""
    names, flags = [], []
    for name, parts in pairs.items():
        for now, wanted in parts:
            names.append(name)
            flags.append(torch.ne(bits(now), bits(wanted.to(now.device, now.dtype))).any())
    if not flags:
        return []
    differs = torch.stack(flags).tolist()
    return sorted({name for name, differ in zip(names, differs, strict=True) if differ})


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy what was sent to where it belongs: small parts of one dtype together, large ones one by one.

    A place that models share is written once.
    """
    small: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    done: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
    with torch.no_grad():
        for now, wanted in pairs:
            place = now.data_ptr(), wanted.data_ptr(), now.shape, now.stride()
            if place in done:
                continue
            done.add(place)
            if now.dtype != wanted.dtype or now.nbytes > SMALL_BYTES:
                now.copy_(wanted)
            else:
                targets, sources = small.setdefault(now.dtype, ([], []))
                targets.append(now)
                sources.append(wanted)
        for targets, sources in small.values():
            torch._foreach_copy_(targets, sources)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().view(_WHOLE[tensor.element_size()])


def addresses(model: nn.Module) -> list[int]:
    """Where a model's parameters and buffers are, in the order of its modules."""
    return [
        tensor.data_ptr()
        for module in model.modules()
        for kept in (module._parameters, module._buffers)
        for tensor in kept.values()
        if tensor is not None
    ]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each under all of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


class _Watch(TorchDispatchMode):
    """Notes copies out of the probe's storage into the model's, and does not do them."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self.probe = 0
        self.found: list[Region] = []
        self._read: View | None = None

    def look_for(self, probe: Tensor) -> None:
        """From here on this is the probe, of which nothing has been found."""
        self.probe, self.found, self._read = probe.untyped_storage().data_ptr(), [], None

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            target, source = arguments[:2]
            owner = self._owners.get(target.untyped_storage().data_ptr())
            if owner is not None and source.untyped_storage().data_ptr() == self.probe:
                self.found.append(Region(View.of(source), owner, View.of(target)))
                return target
            if owner is not None:
                raise RuntimeError(
                    f"the model's loader writes {owner} from a tensor that is not part of the checkpoint's; "
                    "its weights cannot be read back"
                )
        elif function is torch.ops.aten._local_scalar_dense.default:
            of_probe = arguments[0].untyped_storage().data_ptr() == self.probe
            self._read = View.of(arguments[0]) if of_probe else None
        elif function is torch.ops.aten.fill_.Scalar and self._read is not None:
            # Tensors of one element are read by the host and filled in.
            target, source = arguments[0], self._read
            owner = self._owners.get(target.untyped_storage().data_ptr())
            if owner is not None and target.numel() == 1:
                there = View.of(target)
                self.found.append(Region(View(source.offset, there.size, there.stride), owner, there))
                return target
        return function(*arguments, **(keywords or {}))


def trace(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    checkpoint: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
) -> Regions:
    """Watch the model's loader, tensor by tensor; the model is not changed.

    Args:
        model: whose parameters are loaded.
        load: its loader, of (name, tensor) pairs.
        checkpoint: shape and dtype of each tensor of the checkpoint.
        device: where tensors will be when they are loaded.

    Raises:
        RuntimeError: the loader computes new tensors from the checkpoint's, which cannot be traced.
    """
    owners: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        owners.setdefault(tensor.untyped_storage().data_ptr(), name)
    regions = Regions(model)
    with _Watch(owners) as watch:
        for name, (shape, dtype) in checkpoint.items():
            probe = torch.empty(shape, dtype=dtype, device=device)
            watch.look_for(probe)
            load([(name, probe)])
            if watch.found:
                regions.of[name] = watch.found
    return regions

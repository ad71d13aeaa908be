"""Which bytes of which parameters a model's own loader writes for each tensor of its checkpoint.

A model may fuse, split or shard what it loads (query, key and value in one matrix, half of the heads on this
rank). Instead of knowing how, we watch its ``load_weights`` once: copies out of a probe tensor are noted and
not done. From then on any loaded tensor can be read back from where the model keeps it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


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


@dataclass(slots=True)
class Regions:
    """Of one model: the regions of each checkpoint name; a name without any is not loaded by the model."""

    model: nn.Module
    of: dict[str, list[Region]] = field(default_factory=dict)

    def parameter(self, name: str) -> Tensor:
        """The parameter or buffer called so, as it is now."""
        found: Tensor = self._named()[name]
        return found

    def _named(self) -> dict[str, Tensor]:
        return named_tensors(self.model)

    def dtype(self, name: str) -> torch.dtype:
        """In which dtype the model keeps a checkpoint's tensor."""
        return self._named()[self.of[name][0].parameter].dtype

    def read_back(self, name: str, sent: Tensor) -> Tensor:
        """The tensor as the model holds it.

        Args:
            name: in the checkpoint.
            sent: the tensor as it was sent, contiguous, any dtype; parts that live on other ranks are taken
                from it.

        Returns:
            in the model's dtype; equal to ``sent`` cast to it if and only if every copy that the model holds
            is (a tied head that is a copy counts too).
        """
        named = self._named()
        held = sent.detach().to(self.dtype(name)).contiguous().clone()
        for region in self.of[name]:
            now = region.target.on(named[region.parameter])
            place = region.source.on(held)
            wanted = region.source.on(sent.to(now.dtype).contiguous())
            if not torch.equal(bits(now.to(wanted.device)), bits(wanted)):
                place.copy_(now)
        return held


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


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
            watch.probe, watch.found = probe.untyped_storage().data_ptr(), []
            load([(name, probe)])
            if watch.found:
                regions.of[name] = watch.found
    return regions

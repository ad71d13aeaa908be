"""The simulation's `torch_npu.contrib.transfer_to_npu`: megatron-core's CUDA calls mean the NPU.

The real one makes every `torch.cuda` call of the process mean the NPU. This one does so for megatron-core and
MindSpeed alone: for everyone else the names behave as on a host without CUDA, and `.cuda()` is refused, so
that code of ours which is not neutral shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.utils._device import _device_constructors

_ALLOWED = ("megatron", "mindspeed")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor"),
    *("zeros", "zeros_like"),
)
_NPU = torch.device
_applied = False


class StrayCudaError(RuntimeError):
    """Code that should serve every device asked for CUDA."""


def apply() -> None:
    """Puts the transfer in place; once per process."""
    global _applied
    if _applied:
        return
    _applied = True
    # `with torch.device(...)` knows the constructors by identity, remembered before they are wrapped.
    _device_constructors()
    for place in (torch.cuda, torch.cuda.random):
        for name, answer in vars(torch.npu).items():  # type: ignore[attr-defined]
            original = getattr(place, name, None)
            if original is not None and not name.startswith("__"):
                setattr(place, name, _guarded(original, answer) if _is_function(answer) else answer)
    for name in _FACTORIES:
        setattr(torch, name, _on_npu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = _moved(owner)  # type: ignore[method-assign]
    usual_is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
    torch.Tensor.is_cuda = property(  # type: ignore[assignment]
        lambda tensor: tensor.device.type == "npu" if _allowed(sys._getframe(1)) else usual_is_cuda(tensor)
    )


def _allowed(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _ALLOWED


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType) or (callable(value) and not isinstance(value, type))


def _guarded(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _allowed(sys._getframe(1)):
            return answer(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _on_npu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda" and _allowed(sys._getframe(1)):
            kwargs["device"] = _NPU("npu", 0)
        return factory(*args, **kwargs)

    make.__name__ = factory.__name__
    return make


def _moved(owner: type) -> Callable[..., Any]:
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not _allowed(frame):
            where = frame.f_globals.get("__name__", "?")
            raise StrayCudaError(f"{where} calls {owner.__name__}.cuda(); move to the device it was given")
        return self.to(_NPU("npu", 0))

    return cuda

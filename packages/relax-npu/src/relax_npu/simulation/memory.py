"""Tensors of the simulated NPU: ordinary host memory that torch takes for memory of the device `npu`.

DLPack carries a tensor's address and the kind of device it lies on; exchanging the kind gives a second
tensor over the same bytes. So a "copy to the host for a moment" costs nothing and in-place work is seen.
"""

import ctypes
from typing import Any

import torch

_CPU = 1
_EXTENSION = 12  # kDLExtDev, which torch maps to PrivateUse1


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def to_npu(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor on `npu:0`; without a gradient history."""
    return _relabel(tensor, _EXTENSION)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor on the CPU; without a gradient history."""
    return _relabel(tensor, _CPU)


def _relabel(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    capsule: Any = torch._C._to_dlpack(plain)
    described = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    described.device.kind, described.device.index = kind, 0
    relabelled: torch.Tensor = torch._C._from_dlpack(capsule)
    return relabelled

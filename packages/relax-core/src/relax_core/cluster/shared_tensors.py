"""Tensors as Ray shares them between the processes of a host: bytes that nobody copies."""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Packed = dict[str, tuple[NDArray[np.uint8], str, tuple[int, ...]]]
"""By name: the bytes, the dtype's name, the shape."""


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Tensors on any device as arrays of the host."""
    return {
        name: (
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    }


def unpack(packed: Packed) -> dict[str, Tensor]:
    """The tensors, on the same memory: not to be written to."""
    with warnings.catch_warnings():
        # torch knows no tensors that are read-only.
        warnings.simplefilter("ignore", UserWarning)
        return {
            # An array without bytes has no strides that could be viewed as another dtype's.
            name: torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)
            if array.size
            else torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (array, dtype, shape) in packed.items()
        }

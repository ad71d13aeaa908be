"""What every launch in this backend shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels go to the tensor's device (Triton launches on the current one)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied only if the elements of its last axis do not lie side by side."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; 1 where there is no CUDA (the interpreter)."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

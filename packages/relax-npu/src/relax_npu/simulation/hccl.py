"""Collectives of the simulated NPU: the backend `hccl`, which takes tensors of the NPU and runs over gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relax_npu.simulation.kernels import is_npu
from relax_npu.simulation.memory import to_host

_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "gather", "scatter", "send", "recv"),
)


class HcclTensorError(RuntimeError):
    """A collective of HCCL got a tensor that does not lie on the NPU."""


def _alias(value: Any, method: str) -> Any:
    if isinstance(value, list | tuple):
        return [_alias(item, method) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if not is_npu(value):
        raise HcclTensorError(f"{method}: HCCL takes tensors of the NPU, given one on {value.device}")
    if not value.is_contiguous():
        raise HcclTensorError(f"{method}: HCCL takes contiguous tensors, given strides {value.stride()}")
    return to_host(value)


class SimulatedHccl(dist.ProcessGroup):
    """A process group whose every collective is gloo's, over the memory of the device's tensors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo: Any = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        # Says on which device torch puts the objects that it sends (`all_gather_object`).
        self._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)

    def getBackendName(self) -> str:
        """The name that torch asks for."""
        return "hccl"

    def barrier(self, opts: Any = None) -> Any:
        """Waits for every rank."""
        return self._gloo.barrier()


def _forwarded(method: str) -> Any:
    def forward(self: SimulatedHccl, *args: Any) -> Any:
        return getattr(self._gloo, method)(*(_alias(value, method) for value in args))

    forward.__name__ = method
    forward.__doc__ = f"Gloo's {method}."
    return forward


for _name in _METHODS:
    setattr(SimulatedHccl, _name, _forwarded(_name))


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedHccl:
    return SimulatedHccl(store, rank, size, timeout)


def register() -> None:
    """Registers `hccl` with torch.distributed as the backend of `npu`."""
    dist.Backend.register_backend("hccl", _create, devices=["npu"])

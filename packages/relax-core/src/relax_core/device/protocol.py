"""What the trainer asks of an accelerator: the interface of cpu, cuda and third parties' devices."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device as this process sees it, in bytes.

    Attributes:
        allocated: held by live tensors (on cpu: the resident set of the process).
        reserved: held by the allocator, at least `allocated`.
        peak: the largest `allocated` since the last `reset_peak_memory` (on cpu: since the process started).
        total: what the device has.
    """

    allocated: int
    reserved: int
    peak: int
    total: int


@runtime_checkable
class Device(Protocol):
    """An accelerator. One object per process, found by name in the entry-point group `relax_core.devices`.

    Attributes:
        name: "cpu", "cuda", "npu".
        torch_type: the `torch.device` type of its tensors.
        collective_backend: the `torch.distributed` backend ("gloo", "nccl", "hccl").
        visible_variable: the environment variable that lists the devices a process may use, or None.
        deterministic_variables: environment that deterministic runs set before the first kernel.
    """

    name: str
    torch_type: str
    collective_backend: str
    visible_variable: str | None
    deterministic_variables: dict[str, str]

    def available(self) -> bool:
        """Whether this machine has such a device that works; never raises."""
        ...

    def prepare(self) -> None:
        """Makes this process fit for megatron-core: installs a transfer if needed. Idempotent."""
        ...

    def before_megatron(self, parallel: Mapping[str, int | bool | None]) -> None:
        """Last chance to change megatron-core: before its groups are made and before any spec is built.

        Args:
            parallel: sizes of the parallel axes, by megatron-core's names for them.
        """
        ...

    def init(self, local_rank: int = 0) -> torch.device:
        """Takes the device of `local_rank` for this process and returns it. Calls `prepare`."""
        ...

    def seed(self, seed: int) -> None:
        """Seeds python, numpy, torch and the device's generator."""
        ...

    def synchronize(self) -> None:
        """Waits for all queued work."""
        ...

    def chip(self) -> str:
        """The driver's name of this process's device ("NVIDIA H200"); "cpu" on a CPU. After `init`."""
        ...

    def profile(self, folder: Path, name: str) -> AbstractContextManager[None]:
        """A context whose operators, and kernels of the device, are profiled.

        At its end, but for an error, the trace for Perfetto is written: `folder`/`name`.json, or what else
        the device's own profiler makes of these names.

        Args:
            folder: which exists.
            name: a file's name without its ending.
        """
        ...

    def record_memory(self, on: bool) -> bool:
        """Begins, or ends, to keep who allocated what; False where the device keeps no such history."""
        ...

    def dump_memory(self, file: Path) -> None:
        """Writes the history that `record_memory` began, for pytorch.org/memory_viz.

        Args:
            file: a pickle.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Memory now and at its peak."""
        ...

    def reset_peak_memory(self) -> None:
        """Starts a new peak measurement where the device can."""
        ...

    def empty_cache(self) -> None:
        """Gives unused cached memory back."""
        ...

    def stream(self) -> AbstractContextManager[Any]:
        """A context whose work runs on a stream of its own, or at once where there are no streams."""
        ...

    def visible_ids(self) -> tuple[str, ...]:
        """The ids of the devices that this process may use, in order."""
        ...

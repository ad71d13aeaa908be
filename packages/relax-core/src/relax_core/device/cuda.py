"""NVIDIA GPUs, as torch and megatron-core use them: nothing to transfer."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from relax_core.device.profiling import torch_profile
from relax_core.device.protocol import DeviceMemory
from relax_core.device.seeding import seed_host

MEMORY_ENTRIES = 100_000
"""Allocations that are kept with their stacks: the last steps of a model, in less than 1 GiB of the host."""


class CudaDevice:
    """The `cuda` device: NCCL collectives, torch's own streams and memory statistics."""

    name = "cuda"
    torch_type = "cuda"
    collective_backend = "nccl"
    visible_variable: str | None = "CUDA_VISIBLE_DEVICES"
    deterministic_variables: dict[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # noqa: RUF012

    def available(self) -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    def prepare(self) -> None:
        """Nothing: megatron-core is written for this device."""

    def before_megatron(self, parallel: Mapping[str, int | bool | None]) -> None:
        """Nothing: megatron-core is written for this device."""

    def init(self, local_rank: int = 0) -> torch.device:
        """Takes GPU `local_rank` of the visible ones.

        Raises:
            ValueError: torch sees no GPU, or fewer than `local_rank + 1`.
        """
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(
                f"local rank {local_rank} needs {local_rank + 1} GPUs, but torch sees {count} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); "
                "start fewer ranks, or use the cpu device"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def seed(self, seed: int) -> None:
        """Seeds python, numpy, torch and every GPU's generator."""
        seed_host(seed)
        torch.cuda.manual_seed_all(seed)

    def synchronize(self) -> None:
        """Waits for all queued work of the current GPU."""
        torch.cuda.synchronize()

    def chip(self) -> str:
        """The driver's name of the current GPU."""
        return torch.cuda.get_device_name()

    def profile(self, folder: Path, name: str) -> AbstractContextManager[None]:
        """Operators and kernels."""
        return torch_profile(folder, name, [ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def record_memory(self, on: bool) -> bool:
        """The allocator's history with Python stacks, its last entries."""
        torch.cuda.memory._record_memory_history(enabled="all" if on else None, max_entries=MEMORY_ENTRIES)
        return True

    def dump_memory(self, file: Path) -> None:
        """The allocator's snapshot."""
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]

    def memory(self) -> DeviceMemory:
        """The allocator's statistics of the current GPU."""
        return DeviceMemory(
            allocated=torch.cuda.memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            peak=torch.cuda.max_memory_allocated(),
            total=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        )

    def reset_peak_memory(self) -> None:
        """Starts a new peak measurement."""
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Gives unused cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def stream(self) -> AbstractContextManager[Any]:
        """A context whose kernels run on a new stream."""
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def visible_ids(self) -> tuple[str, ...]:
        """The ids in CUDA_VISIBLE_DEVICES, or 0..n-1 when it is not set."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            return tuple(str(index) for index in range(torch.cuda.device_count()))
        return tuple(part.strip() for part in listed.split(",") if part.strip())

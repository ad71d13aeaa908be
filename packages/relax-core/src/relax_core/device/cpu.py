"""The CPU as a training device: megatron-core's calls of `torch.cuda` are answered by the host."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from relax_core.device import cpu_transfer
from relax_core.device.host_memory import host_bytes, peak_resident_bytes, resident_bytes
from relax_core.device.profiling import torch_profile
from relax_core.device.protocol import DeviceMemory
from relax_core.device.seeding import seed_host


class CpuDevice:
    """The `cpu` device: gloo collectives, work done at once, one "device" per process."""

    name = "cpu"
    torch_type = "cpu"
    collective_backend = "gloo"
    visible_variable: str | None = None
    deterministic_variables: dict[str, str] = {}  # noqa: RUF012

    def available(self) -> bool:
        """Always."""
        return True

    def prepare(self) -> None:
        """Installs the transfer (see `relax_core.device.cpu_transfer`)."""
        cpu_transfer.install()

    def before_megatron(self, parallel: Mapping[str, int | bool | None]) -> None:
        """Nothing more: `prepare` has answered megatron's calls."""

    def init(self, local_rank: int = 0) -> torch.device:
        """Prepares the process; every local rank shares the host's cores."""
        self.prepare()
        return torch.device("cpu")

    def seed(self, seed: int) -> None:
        """Seeds python, numpy and torch."""
        seed_host(seed)

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def chip(self) -> str:
        """No table has the host."""
        return "cpu"

    def profile(self, folder: Path, name: str) -> AbstractContextManager[None]:
        """Operators."""
        return torch_profile(folder, name, [ProfilerActivity.CPU])

    def record_memory(self, on: bool) -> bool:
        """The host's allocator keeps no history."""
        return False

    def dump_memory(self, file: Path) -> None:
        """There is no history to write."""

    def memory(self) -> DeviceMemory:
        """The resident set of this process, now and at its peak, and the host's memory."""
        resident = resident_bytes()
        return DeviceMemory(resident, resident, peak_resident_bytes(), host_bytes()[1])

    def reset_peak_memory(self) -> None:
        """The kernel keeps one peak per process; there is nothing to reset."""

    def empty_cache(self) -> None:
        """The host has no cache of its own."""

    def stream(self) -> AbstractContextManager[Any]:
        """Work runs at once."""
        return contextlib.nullcontext()

    def visible_ids(self) -> tuple[str, ...]:
        """One id: the host."""
        return ("0",)

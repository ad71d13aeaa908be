"""Starts and ends a trainer process: device, collectives, megatron's parallel groups, seeds, corrections."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from relax_core.device.parallel import ParallelConfig
from relax_core.device.protocol import Device
from relax_core.device.registry import get_device
from relax_core.upstream import install_corrections

logger = logging.getLogger(__name__)

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        device: the device it trains on.
        torch_device: where its tensors live.
        rank, size: among all processes. local_rank: among those of this host.
        parallel: the sizes of the parallel axes.
    """

    device: Device
    torch_device: torch.device
    rank: int
    size: int
    local_rank: int
    parallel: ParallelConfig

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.size // self.parallel.model_size


def initialise(
    device: str | Device = "cpu",
    parallel: ParallelConfig | None = None,
    *,
    seed: int = 1234,
    deterministic: bool = False,
    timeout: timedelta = timedelta(minutes=30),
    store: Store | None = None,
) -> World:
    """Makes this process a trainer rank.

    Under a launcher (torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set) the ranks meet through
    the launcher's store. Otherwise the process is alone and its store lives in its memory: no TCP port is
    taken, so that any number of runs share a host.

    Args:
        device: a name of `device_names()`, or the device itself.
        parallel: sizes of the parallel axes; all 1 when None.
        seed: for the host's, the device's and megatron's generators; 0 <= seed < 2**31.
        deterministic: takes kernels that give the same bits from run to run; what has none is refused by
            torch. Slower; `shutdown` ends it.
        timeout: of every collective.
        store: where the ranks meet, instead of the launcher's; RANK and WORLD_SIZE must be set.

    Raises:
        ValueError: the world does not divide by the parallel sizes, or the launcher's environment is
            incomplete.
        RuntimeError: the process is a trainer rank already (call `shutdown` first).
    """
    parallel = parallel or ParallelConfig()
    chosen = get_device(device) if isinstance(device, str) else device
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already in this process; call shutdown() first")
    rank, size, local_rank = _place(needs_address=store is None)
    if size % parallel.model_size:
        raise ValueError(
            f"{size} ranks do not divide by tensor {parallel.tensor} x pipeline {parallel.pipeline} x "
            f"context {parallel.context} = {parallel.model_size}; "
            f"start a multiple of {parallel.model_size} ranks"
        )
    if deterministic:
        _be_deterministic(chosen)
    torch_device = chosen.init(local_rank)
    install_corrections()
    chosen.before_megatron(_megatron_sizes(parallel))
    if store is None and not _launched():
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        chosen.collective_backend, store=store, rank=rank, world_size=size, timeout=timeout
    )
    _start_megatron(parallel)
    seed_all(chosen, seed)
    return World(chosen, torch_device, rank, size, local_rank, parallel)


def seed_all(device: Device, seed: int) -> None:
    """Seeds the host, the device and megatron's tracked generators (different per tensor, expert rank)."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device.seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shutdown() -> None:
    """Destroys megatron's groups and torch's process group; the process may call `initialise` again."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.set_deterministic_debug_mode("default")


def _be_deterministic(device: Device) -> None:
    for name, value in device.deterministic_variables.items():
        os.environ.setdefault(name, value)
    # The other function of torch for this loads its compiler, to tell it too.
    torch.set_deterministic_debug_mode("error")
    # All memory is written before it is read here; filling it with NaN first only takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _megatron_sizes(parallel: ParallelConfig) -> dict[str, int | bool | None]:
    """The parallel axes by megatron-core's names."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.pipeline_chunks
        if parallel.pipeline_chunks > 1
        else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _start_megatron(parallel: ParallelConfig) -> None:
    from megatron.core import parallel_state

    sizes = _megatron_sizes(parallel)
    # Not a matter of groups.
    sizes.pop("sequence_parallel")
    parallel_state.initialize_model_parallel(**sizes)


def _launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _place(*, needs_address: bool) -> tuple[int, int, int]:
    """Rank, world size and local rank, from the launcher or alone.

    Raises:
        ValueError: some of the launcher's variables are missing.
    """
    if not _launched():
        return 0, 1, 0
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing and needs_address:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} is not; "
            "start through torchrun, or unset RANK and WORLD_SIZE to run one process"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return rank, size, int(os.environ.get("LOCAL_RANK", rank))

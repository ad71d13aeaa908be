"""The device `npu` of relax-core, through torch_npu; torch is first imported when a method needs it."""

import importlib
import importlib.util
import logging
import os
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_npu import hccl, visible
from relax_npu.probe import ProbeState, probe
from relax_npu.upstream import megatron, mindspeed_use

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Allocations that are kept with their stacks.
_MEMORY_ENTRIES = 100_000


class NpuUnavailableError(RuntimeError):
    """torch_npu does not work on this machine; the message says what `relax-npu doctor` would look at."""


@dataclass(frozen=True)
class NpuMemory:
    """Memory of one NPU as this process sees it, in bytes.

    Attributes:
        allocated: held by live tensors.
        reserved: held by the allocator, at least `allocated`.
        peak: the largest `allocated` since the last `reset_peak_memory`.
        total: what the device has.
    """

    allocated: int
    reserved: int
    peak: int
    total: int


class NpuDevice:
    """The Ascend NPU: HCCL collectives, torch_npu's streams, generators and memory statistics.

    Making one needs nothing; the first method that needs the NPU says clearly when there is none.
    """

    name = "npu"
    torch_type = "npu"
    collective_backend = hccl.BACKEND
    visible_variable: str | None = visible.VARIABLE

    def __init__(self) -> None:
        # Reproducible order in collectives, and no reordering along K in matrix products.
        self.deterministic_variables = {"HCCL_DETERMINISTIC": "True", "CLOSE_MATMUL_K_SHIFT": "1"}

    def available(self) -> bool:
        """Whether an NPU works here; never raises.

        Asks in a child process (see `probe`), for some seconds, only where torch_npu is installed. Where it
        is and does not work, the reason is logged, for the caller will then take another device.
        """
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            visible.parse_visible(os.environ.get(visible.VARIABLE, ""))
        except visible.VisibleDevicesError as error:
            logger.warning("the npu device is not used: %s", error)
            return False
        found = probe()
        if found.state is ProbeState.READY:
            return True
        logger.warning(
            "torch_npu is installed, but the npu device is not used: %s at `%s` %s; run `relax-npu doctor`",
            found.state.value,
            found.stage,
            found.error,
        )
        return False

    def prepare(self) -> None:
        """Makes megatron-core's `torch.cuda` calls mean the NPU, through torch_npu's transfer. Idempotent.

        Raises:
            NpuUnavailableError: torch or torch_npu is missing or cannot be imported.
            VisibleDevicesError: ASCEND_RT_VISIBLE_DEVICES is malformed (CANN would not say so).
        """
        visible.parse_visible(os.environ.get(visible.VARIABLE, ""))
        loaded = _torch()
        with megatron.transferring(loaded):
            _import("torch_npu.contrib.transfer_to_npu")
        megatron.name_types(loaded.Tensor)

    def before_megatron(self, parallel: Mapping[str, int | bool | None]) -> None:
        """Loads MindSpeed if RELAX_NPU_MINDSPEED asks for it: before any spec is built, with these sizes.

        Args:
            parallel: sizes of the parallel axes under megatron-core's names.

        Raises:
            MindSpeedSettingError: it is asked for and not installed, or the variable is malformed.
            FixMismatchError: another MindSpeed than the corrections were made for.
        """
        mindspeed_use.load_if_asked(parallel)

    def init(self, local_rank: int = 0) -> "torch.device":
        """Takes the NPU of `local_rank` among the visible ones. Calls `prepare`.

        Raises:
            NpuUnavailableError: as `prepare`, or no NPU is visible.
            ValueError: fewer NPUs are visible than `local_rank + 1`.
        """
        self.prepare()
        loaded = _torch()
        count = loaded.npu.device_count()
        told = f"{visible.VARIABLE}={os.environ.get(visible.VARIABLE, 'unset')}"
        if not count:
            raise NpuUnavailableError(
                f"torch_npu sees no NPU ({told}); run `relax-npu doctor` for the reason"
            )
        if not 0 <= local_rank < count:
            raise ValueError(
                f"local rank {local_rank} needs {local_rank + 1} NPUs, but {count} are visible ({told}); "
                "start fewer ranks or make more NPUs visible"
            )
        loaded.npu.set_device(local_rank)
        device: torch.device = loaded.device("npu", local_rank)
        return device

    def seed(self, seed: int) -> None:
        """Seeds python, numpy, torch and the generator of every visible NPU."""
        import numpy as np

        loaded = _torch()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        loaded.manual_seed(seed)
        loaded.npu.manual_seed_all(seed)

    def synchronize(self) -> None:
        """Waits for all queued work of the current NPU."""
        _torch().npu.synchronize()

    def chip(self) -> str:
        """The driver's name of the current NPU, such as Ascend910_9391: one die of a card with two."""
        return str(_torch().npu.get_device_name())

    @contextmanager
    def profile(self, folder: Path, name: str) -> Iterator[None]:
        """Operators and kernels, through torch_npu's own profiler, which torch's does not know.

        It writes a folder `<name>_<process>_<time>_ascend_pt`: in ASCEND_PROFILER_OUTPUT there,
        `trace_view.json` is the trace for Perfetto; MindStudio Insight opens all of it.

        Args:
            folder: which exists.
            name: with which the folder's name begins.
        """
        _torch()
        profiler: Any = _import("torch_npu.profiler")
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        handler = profiler.tensorboard_trace_handler(dir_name=str(folder), worker_name=name)
        with profiler.profile(activities=activities, on_trace_ready=handler):
            yield

    def record_memory(self, on: bool) -> bool:
        """The allocator's history with Python stacks, its last entries."""
        memory: Any = _memory()
        memory._record_memory_history(enabled="all" if on else None, max_entries=_MEMORY_ENTRIES)
        return True

    def dump_memory(self, file: Path) -> None:
        """The allocator's snapshot, in the form that pytorch.org/memory_viz reads.

        Not by torch_npu's own dump: it makes a file that only root can read, and starts a profiler beside.
        """
        memory: Any = _memory()
        with file.open("wb") as opened:
            pickle.dump(memory._snapshot(), opened)

    def memory(self) -> NpuMemory:
        """The allocator's statistics of the current NPU."""
        npu = _torch().npu
        return NpuMemory(
            allocated=npu.memory_allocated(),
            reserved=npu.memory_reserved(),
            peak=npu.max_memory_allocated(),
            total=npu.get_device_properties(npu.current_device()).total_memory,
        )

    def reset_peak_memory(self) -> None:
        """Starts a new peak measurement."""
        _torch().npu.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Gives unused cached blocks back to the driver."""
        _torch().npu.empty_cache()

    def stream(self) -> AbstractContextManager[Any]:
        """A context whose kernels run on a new stream."""
        npu = _torch().npu
        context: AbstractContextManager[Any] = npu.stream(npu.Stream())
        return context

    def visible_ids(self) -> tuple[str, ...]:
        """The physical ids in ASCEND_RT_VISIBLE_DEVICES, or 0..n-1 when it is not set.

        Raises:
            VisibleDevicesError: the variable is malformed.
            NpuUnavailableError: it is not set, and torch_npu cannot be asked.
        """
        listed = os.environ.get(visible.VARIABLE)
        if listed is not None:
            return tuple(str(number) for number in visible.parse_visible(listed))
        return tuple(str(number) for number in range(_torch().npu.device_count()))


def _memory() -> ModuleType:
    _torch()
    return _import("torch_npu.npu.memory")


def _torch() -> Any:
    """torch with torch_npu loaded."""
    loaded = _import("torch")
    _import("torch_npu")
    return loaded


def _import(name: str) -> ModuleType:
    """Imports a part of the NPU stack.

    An installed torch_npu without CANN raises ImportError or OSError by itself, and RuntimeError out of
    `import torch`, which loads it as a backend.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise NpuUnavailableError(
            f"the npu device needs {name}, and importing it failed: {type(error).__name__}: {error}. "
            "Run `relax-npu doctor`: it finds the reason and says what to do"
        ) from error

"""The torch device `npu` of the simulation, and the module `torch.npu` with what torch_npu has there."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from relax_npu.simulation import kernels

TOTAL_MEMORY = 64 * 2**30
_NAME = "Ascend910_9391"


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.npu_stream = 0
        self.cuda_stream = 0

    @property
    def device(self) -> torch.device:
        """The one device."""
        return torch.device("npu", 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> "Event":
        """Returns an event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """All work is done."""
        return True


class Event:
    """A moment that has passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """No time passes on this device."""
        return 0.0


def npu_module(visible: int) -> types.ModuleType:
    """Makes `torch.npu` for a process that sees `visible` devices; all of them are the host."""
    module = types.ModuleType("torch.npu")
    current = [0]
    stream = Stream()

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < visible:
            raise RuntimeError(f"Invalid NPU device {index}: {visible} are visible")
        current[0] = index

    @contextlib.contextmanager
    def on_stream(chosen: Any) -> Iterator[Any]:
        yield chosen

    names: dict[str, Any] = {
        "device_count": lambda: visible,
        "is_available": lambda: visible > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": kernels.generator.manual_seed,
        "manual_seed_all": kernels.generator.manual_seed,
        "get_rng_state": lambda device=None: kernels.generator.get_state(),
        "set_rng_state": lambda state, device=None: kernels.generator.set_state(state),
        "default_generators": (kernels.generator,) * max(visible, 1),
        "_is_in_bad_fork": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda chosen: None,
        "stream": on_stream,
        "device": lambda device=None: contextlib.nullcontext(device),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=_NAME, total_memory=TOTAL_MEMORY, major=0, minor=0
        ),
        "get_device_name": lambda device=None: _NAME,
        "get_device_capability": lambda device=None: None,
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": lambda device=None: (TOTAL_MEMORY, TOTAL_MEMORY),
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
        "_lazy_call": lambda call, **kwargs: call(),
        "nvtx": types.SimpleNamespace(
            range_push=lambda message: None,
            range_pop=lambda: None,
            range=lambda message, *args, **kwargs: contextlib.nullcontext(),
        ),
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        names[name] = lambda device=None: 0
    vars(module).update(names)
    return module


def register(visible: int) -> types.ModuleType:
    """Makes `npu` a device of this process's torch; torch allows that once.

    Raises:
        RuntimeError: this torch cannot take a device written in Python (it needs 2.11), or has another
            such device already.
    """
    module = npu_module(visible)
    _setup_privateuseone_for_python_backend("npu", module, _Hooks(), _Guard())
    kernels.register()
    return module

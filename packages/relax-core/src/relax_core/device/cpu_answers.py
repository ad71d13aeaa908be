"""The CPU's answers to the calls that megatron-core makes of a GPU (`cpu_transfer` puts them in place)."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from relax_core.device.host_memory import host_bytes, resident_bytes

_HOST = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "tensor", "zeros", "zeros_like"),
)
_NOTHING = ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats", "_lazy_init")
_RESIDENT = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _HOST
        self.cuda_stream = 0

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

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """The event, recorded now."""
        event = event or Event()
        event.record()
        return event


class Event:
    """A moment on the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Remembers the time."""
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end.seconds - self.seconds) * 1e3


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def cuda_names() -> dict[str, Any]:
    """Part cuda-calls: names of `torch.cuda` and what they are to megatron."""
    stream = Stream()
    names: dict[str, Any] = {name: lambda *args, **kwargs: None for name in _NOTHING}
    names |= {name: lambda device=None: resident_bytes() for name in _RESIDENT}
    names |= {
        "current_device": lambda: _HOST,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "device": lambda device=None: contextlib.nullcontext(device),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "memory_stats": lambda device=None: defaultdict(int),
        "mem_get_info": lambda device=None: host_bytes(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": _Generators(),
        "_lazy_call": lambda call, **kwargs: call(),
        "nvtx": _Nvtx(),
    }
    return names


class _Nvtx:
    def range_push(self, message: str) -> None:
        """Ranges are not recorded on the host."""

    def range_pop(self) -> None:
        """Ranges are not recorded on the host."""

    def range(self, message: str, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """An empty context."""
        return contextlib.nullcontext()


def factories() -> dict[str, Callable[..., Any]]:
    """Part factories: each tensor constructor with `device="cuda"` and `pin_memory=True` meaning the host."""
    return {name: _on_host(getattr(torch, name)) for name in _FACTORIES}


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _HOST
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    make.__name__ = factory.__name__
    return make


def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
    """Part jit-fuser: `torch.compile` that leaves the function as it is."""
    return model if model is not None else (lambda function: function)


def autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    """`torch.autocast("cuda", ...)` on the host."""
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def distributed_names() -> dict[str, Any]:
    """Part collectives: names of `torch.distributed` and what they are to megatron."""

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return torch.distributed.barrier(group=group, async_op=async_op)

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return torch.distributed.all_to_all_single(
            output, input, _sizes(output_split_sizes), _sizes(input_split_sizes), group, async_op
        )

    return {"barrier": barrier, "all_to_all_single": all_to_all_single}


def _sizes(splits: Any) -> Any:
    return splits.tolist() if hasattr(splits, "tolist") else splits


def rng_names() -> dict[str, Callable[..., Any]]:
    """Part rng-tracker: how `tensor_parallel.random` reads and writes the device's generator."""

    def _get_cuda_rng_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return {"_get_cuda_rng_state": _get_cuda_rng_state, "_set_cuda_rng_state": _set_cuda_rng_state}


@contextlib.contextmanager
def fork_tracked_rng(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Part rng-tracker: draws inside the context advance the state called `name` and no other.

    The device's generator is the host's here, so upstream's warning that the host's generator moved is
    left out.

    Raises:
        KeyError: no state has that name.
    """
    if name not in tracker.states_:
        raise KeyError(f"no generator state named {name!r}; known: {sorted(tracker.states_)}")
    outer_state, outer_name = torch.get_rng_state(), tracker._current_state_name
    if outer_name != "default-rng":
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(tracker.states_[outer_name] if outer_name != "default-rng" else outer_state)
        tracker._current_state_name = outer_name


def tensor_methods() -> dict[str, Callable[..., Any]]:
    """Part tensor-methods: `answer(usual_method, tensor, *args)` for calls that come from megatron."""

    def itself(usual: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    def nothing(usual: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        return None

    def type_name(usual: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = usual(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return {"cuda": itself, "pin_memory": itself, "record_stream": nothing, "type": type_name}

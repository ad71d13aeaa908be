"""Executes the operators of the real torch_npu, whose kernels are CANN's, over the stub's memory on the host.

The stub's device memory is the host's, so an alias of a tensor of the NPU is an ordinary tensor. Below
autograd, where kernels would be launched, an operator of torch runs on the CPU over such aliases, and one of
torch_npu by the formulas of the simulated NPU. What is real: schemas, device and allocator, views, and
torch_npu's own derivatives, which stand above, and its meta functions, which every call is compared with.
"""

import ctypes
from collections import Counter
from typing import Any

import torch
from relax_npu.simulation.fla_npu_ops import KERNELS as FLA_NPU
from relax_npu.simulation.kernels import require_one_device
from relax_npu.simulation.torch_npu_ops import KERNELS as TORCH_NPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def _repeat_interleave_backward_int(
    grad: torch.Tensor, input: torch.Tensor, repeats: int, dim: int | None = None
) -> torch.Tensor:
    """torch_npu's own derivative of torch's repeat_interleave."""
    axis = -1 if dim is None else dim % input.ndim
    summed = grad.unflatten(axis, (-1, repeats)).sum(axis + 1 if axis >= 0 else -1)
    return summed.reshape(input.shape)


def _rotary_mul_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch_npu's own derivative of npu_rotary_mul, which ours does without."""
    first, second = input.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    sine_first, sine_second = (grad * r2).chunk(2, -1)
    dinput = grad * r1 + torch.cat((sine_second, -sine_first), -1)
    axes = [axis for axis, size in enumerate(r1.shape) if size == 1]
    return dinput, (grad * input).sum(axes, keepdim=True), (grad * turned).sum(axes, keepdim=True)


KERNELS = TORCH_NPU | FLA_NPU
KERNELS |= {
    "repeat_interleave_backward_int": _repeat_interleave_backward_int,
    "npu_rotary_mul_backward": _rotary_mul_backward,
}
RELEASE = "2.9.0.post4"
_MADE_BY_TORCH_NPU = ("aten::empty.memory_format", "aten::empty_strided")
_BETWEEN_DEVICES = ("_to_copy", "copy_")


def is_npu(value: Any) -> bool:
    """Whether a value is a tensor, or the name, of the NPU."""
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type == "npu"


def to_host(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=x.dtype, count=storage.nbytes() // x.element_size())
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def to_npu(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the NPU with these values."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    to_host(made).copy_(x)
    return made


def _on_host(values: Any) -> Any:
    aliased = tree_map_only(torch.Tensor, lambda x: to_host(x) if is_npu(x) else x, values)
    return tree_map_only(torch.device, lambda x: torch.device("cpu"), aliased)


def _without_data(values: Any) -> Any:
    def described(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return tree_map_only(torch.Tensor, described, values)


def _compare(func: Any, results: Any, told: Any) -> None:
    """Requires shapes and dtypes that torch_npu's meta function tells; empty results do not count."""
    ours, theirs = (
        [
            (tuple(x.shape), x.dtype)
            for x in tree_leaves(values)
            if isinstance(x, torch.Tensor) and tuple(x.shape) != (0,)
        ]
        for values in (results, told)
    )
    assert ours == theirs, f"{func}: the simulation gives {ours}, torch_npu's meta function {theirs}"


class HostExecution(TorchDispatchMode):
    """While it is entered, operators of the NPU run as the module says.

    Attributes:
        executed: how often each did, by name.
        checked_by_meta: how often torch_npu's own meta function told the results' shapes and dtypes alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.executed: Counter[str] = Counter()
        self.checked_by_meta: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        places = [x for x in leaves if is_npu(x)]
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not places or is_view or func.name() in _MADE_BY_TORCH_NPU:
            return func(*args, **kwargs)
        space, _, name = func.name().partition("::")
        if name not in _BETWEEN_DEVICES:
            require_one_device(func.name(), (args, kwargs))
        self.executed[f"{space}.{name}"] += 1
        wanted = next((x for x in leaves if isinstance(x, torch.device)), None)
        if wanted is None:
            wanted = next(x for x in places if isinstance(x, torch.Tensor)).device
        kernel = KERNELS[name] if space == "npu" else func
        results = kernel(*_on_host(args), **_on_host(kwargs))
        if space == "npu" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
            _compare(func, results, func(*_without_data(args), **_without_data(kwargs)))
            self.checked_by_meta[name] += 1
        written = [
            given
            for argument, given in self._given(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            return written[0] if len(returns) == 1 else tuple(written) if returns else None
        if wanted.type != "npu":
            # What came back may lie over the device's memory.
            return tree_map_only(torch.Tensor, torch.clone, results)
        return tree_map_only(torch.Tensor, lambda x: to_npu(x, wanted), results)

    @staticmethod
    def _given(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        by_place = list(zip(func._schema.arguments, args, strict=False))
        return by_place + [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]

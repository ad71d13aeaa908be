"""How the simulated NPU executes: every aten operator runs on the host over the device's own memory.

One kernel serves all operators. It refuses operands on two devices as a real device does, lets the CPU
compute over aliases of the operands, and hands the results out as tensors of the device. Operators that
return a view share the storage; those that write return what they wrote to.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from relax_npu.simulation.memory import to_host, to_npu

executed: Counter[str] = Counter()
"""How often each operator ran on the device, by name."""

generator = torch.Generator()
"""The device's own generator of random numbers."""

_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique", "unique", "equal")
"""Operators whose result the host has to wait for, since its size depends on values or it is a truth."""

_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []


class MixedDevicesError(RuntimeError):
    """An operator got tensors of the host and of the NPU."""


def is_npu(value: Any) -> bool:
    """Whether a value is a tensor of the simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def require_one_device(name: str, operands: Any) -> None:
    """Refuses tensors of the host among those of the NPU; a number in a tensor (0 axes) is allowed.

    Raises:
        MixedDevicesError: naming the operator.
    """
    for leaf in tree_leaves(operands):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.ndim:
            raise MixedDevicesError(
                f"{name}: expected all tensors to be on the same device, but found npu:0 and cpu "
                f"(shape {tuple(leaf.shape)}); move it with .to(device)"
            )


def on_host(values: Any) -> Any:
    """Returns a structure with its NPU tensors as host tensors over the same memory."""
    return tree_map_only(torch.Tensor, lambda x: to_host(x) if is_npu(x) else x, values)


def on_npu(values: Any) -> Any:
    """Returns a structure with its host tensors as NPU tensors over the same memory."""
    return tree_map_only(torch.Tensor, lambda x: x if is_npu(x) else to_npu(x), values)


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operator that has none of its own here."""
    executed[str(op)] += 1
    if str(op).removeprefix("aten.").startswith(_SIZED_BY_VALUES):
        executed["npu.synchronize"] += 1
    require_one_device(str(op), (args, kwargs))
    returns = op._schema.returns
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return op.redispatch(_CPU_KERNELS, *args, **kwargs)
    args = tuple(_as_tensor(a, x) for a, x in zip(op._schema.arguments, args, strict=False))
    kwargs = {name: _host_device(value) for name, value in kwargs.items()}
    written = _written(op, args, kwargs)
    # The CPU may give an empty result its size, which an alias cannot take.
    sized = {id(x): torch.empty(x.shape, dtype=x.dtype) for x in written if is_npu(x) and not x.numel()}
    if "generator" in {argument.name for argument in op._schema.arguments}:
        kwargs.setdefault("generator", generator)
    results = op(*_aliases(args, sized), **_aliases(kwargs, sized))
    for x in written:
        if id(x) in sized and sized[id(x)].shape != x.shape:
            fresh = to_npu(sized[id(x)])
            x.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
    if written:
        return written[0] if len(returns) == 1 else tuple(written) if returns else None
    return on_npu(results)


def _aliases(values: Any, instead: dict[int, torch.Tensor]) -> Any:
    return tree_map_only(
        torch.Tensor, lambda x: instead[id(x)] if id(x) in instead else to_host(x) if is_npu(x) else x, values
    )


def _as_tensor(argument: Any, value: Any) -> Any:
    """Undoes the dispatcher, which hands a number that stands for a tensor to Python as a number."""
    is_number = isinstance(value, int | float | complex) and str(argument.type) == "Tensor"
    if not is_number:
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _host_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that the operator returns because it wrote to them."""
    named = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    return [
        named[argument.name]
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]


def _empty(
    size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    form = torch.contiguous_format if memory_format is None else memory_format
    return to_npu(torch.empty(size, dtype=dtype, memory_format=form))


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return to_npu(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.device.type == "cpu" and not non_blocking:
        executed["npu.synchronize"] += 1
    on_host(target).copy_(on_host(source))
    return target


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """torch's own would ask the device for pinned memory of the host where the copy may go on meanwhile."""
    made = torch.ops.aten._to_copy(to_host(tensor), dtype=dtype, memory_format=memory_format)
    if device is None or device.type == "npu":
        return to_npu(made)
    if tensor.device.type == "npu" and not non_blocking:
        executed["npu.synchronize"] += 1
    copied: torch.Tensor = made
    return copied


def _local_scalar(tensor: torch.Tensor) -> Any:
    executed["npu.synchronize"] += 1
    return to_host(tensor).item()


def _set_storage(tensor: torch.Tensor, storage: Any) -> Any:
    return torch.ops.aten.set_.source_Storage.redispatch(_CPU_KERNELS, tensor, storage)


def _set_part(tensor: torch.Tensor, *args: Any) -> Any:
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNELS, tensor, *args)


def _resize(
    tensor: torch.Tensor, size: Any, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if tensor.shape != torch.Size(size):
        fresh = to_npu(torch.empty(size, dtype=tensor.dtype))
        tensor.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
    return tensor


def _no_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Everything has happened already."""


_OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar,
    "set_.source_Storage": _set_storage,
    "set_.source_Storage_storage_offset": _set_part,
    "resize_": _resize,
    "record_stream": _no_stream,
}


def register() -> None:
    """Registers the kernels with torch's dispatcher; once per process."""
    fallback = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(run, "PrivateUse1")  # type: ignore[no-untyped-call]
    own = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in _OWN.items():
        own.impl(name, function, "PrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, own))

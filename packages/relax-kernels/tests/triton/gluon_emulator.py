"""Run a gluon kernel for Hopper as plain Python on the CPU, program after program.

Copies and products happen when they are issued, so races and missing fences do not show. What does show: the
arithmetic, tiles and coordinates, bytes promised to a barrier and not delivered, waits for the wrong phase.
"""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction


class Value(torch.Tensor):
    """A tensor in registers: assignment operators make new ones."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other


class Pointer:
    """A place, or a tensor of places, in a flat tensor."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)


class Shared:
    """A tile in shared memory; `low` is what the emulation uses for bfloat16."""

    layout = None

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, place: Any) -> Any:
        item = self.data[int(place)]
        return item if isinstance(item, Barrier) else Shared(item)

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def store(self, value: torch.Tensor) -> None:
        assert (value.shape, value.dtype) == (self.data.shape, self.data.dtype)
        self.data.copy_(value)

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone().as_subclass(Value)


class Barrier:
    """A barrier that counts bytes: one phase lasts from `expect` until all of them have come."""

    def __init__(self) -> None:
        self.missing = 0
        self.phases = 0

    def expect(self, size: int) -> None:
        assert not self.missing, "armed before the last phase was over"
        self.missing = size

    def deliver(self, size: int) -> None:
        self.missing -= size
        assert self.missing >= 0, "more bytes than were promised"
        if not self.missing:
            self.phases += 1

    def wait(self, parity: int) -> None:
        finished = (self.phases - 1) & 1 if self.phases and not self.missing else None
        assert parity == finished, "would wait for ever"


class Descriptor:
    """A two-dimensional tensor read and written in tiles; what lies outside reads as 0."""

    layout = None

    def __init__(self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any) -> None:
        self.view = base.as_strided(tuple(shape), tuple(strides))
        self.block = tuple(block_shape)

    def tile(self, place: list[Any]) -> torch.Tensor:
        row, column = (int(x) for x in place)
        return self.view[row : row + self.block[0], column : column + self.block[1]]


def emulate(kernel: Any, low: torch.dtype) -> Any:
    """Return something launched as `kernel[grid](...)` that runs it here, with `low` in the place of
    bfloat16.
    """
    return _Launcher(kernel, low)


class _Launcher:
    def __init__(self, kernel: Any, low: torch.dtype) -> None:
        self.kernel, self.low = kernel, low

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, num_warps: int, **options: Any) -> None:
            given = [Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in arguments]
            for program in range(grid[0]):
                _bind(self.kernel.fn, program, grid[0], self.low)(*given, **options)

        return run


def _bind(function: FunctionType, program: int, programs: int, low: torch.dtype) -> FunctionType:
    """Return the kernel's function with the language replaced."""
    language = {
        "gl": _language(program, programs, low),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_copy_in,
            async_copy_shared_to_global=_copy_out,
            store_wait=lambda pending: None,
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=lambda barrier, count: None,
            invalidate=lambda barrier: None,
            expect=lambda barrier, size, pred=True: _one(barrier).expect(int(size)) if pred else None,
            wait=lambda barrier, parity: _one(barrier).wait(int(parity)),
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
    }
    helpers = {
        name: _bind(function.__globals__[name].fn, program, programs, low)
        for name in function.__code__.co_names
        if isinstance(function.__globals__.get(name), GluonJITFunction)
    }
    return FunctionType(
        function.__code__, {**function.__globals__, **helpers, **language}, argdefs=function.__defaults__
    )


def _one(barrier: Any) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.index(0)


def _copy_in(source: Descriptor, place: list[Any], barrier: Any, target: Shared, pred: Any = True) -> None:
    if not pred:
        return
    tile = source.tile(place)
    target.data.zero_()
    target.data[: tile.shape[0], : tile.shape[1]] = tile
    _one(barrier).deliver(2 * math.prod(source.block))


def _copy_out(target: Descriptor, place: list[Any], source: Shared) -> None:
    tile = target.tile(place)
    tile.copy_(source.data[: tile.shape[0], : tile.shape[1]])


def _multiply(a: Shared, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
    product = a.data.float() @ b.data.float()
    return product + acc if use_acc else product


def _language(program: int, programs: int, low: torch.dtype) -> Any:
    def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if layout == "barrier":
            return Shared([Barrier() for _ in range(shape[0])])  # type: ignore[arg-type]
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
        offset = torch.as_tensor(pointer.offset)
        if mask is None:
            return pointer.flat[offset]
        mask = torch.as_tensor(mask).broadcast_to(offset.shape)
        return torch.where(mask, pointer.flat[torch.where(mask, offset, 0)], other)

    def store(pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
        value = torch.as_tensor(value).to(pointer.flat.dtype)
        mask = torch.as_tensor(mask).broadcast_to(value.shape)
        offset = torch.as_tensor(pointer.offset).broadcast_to(value.shape)
        pointer.flat[offset[mask]] = value[mask]

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return SimpleNamespace(
        bfloat16=low,
        float32=torch.float32,
        int64=torch.int64,
        NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing,
        BlockedLayout=nothing,
        SliceLayout=nothing,
        allocate_shared_memory=allocate,
        arange=lambda start, end, layout=None: torch.arange(start, end),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Value),
        program_id=lambda axis: torch.tensor(program),
        num_programs=lambda axis: torch.tensor(programs),
        load=load,
        store=store,
        exp=torch.exp,
        maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
        where=torch.where,
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        static_range=range,
        thread_barrier=nothing,
    )

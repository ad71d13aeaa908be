"""Checks of operator inputs, made before anything is computed: every refusal names the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any

import torch

from relax_kernels.contract import Call
from relax_kernels.cu_seqlens import CuSeqlens
from relax_kernels.errors import InvalidInput

_LARGEST = 2**63 - 1  # of torch's whole numbers
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Checker:
    """Collects the sizes of one call's axes and refuses whatever contradicts them."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self._origin: dict[str, str] = {}
        self._device: tuple[str, torch.device] | None = None

    def fail(self, message: str) -> InvalidInput:
        """Return (not raise) the refusal of this operator with a message."""
        return InvalidInput(f"{self.op}: {message}")

    def tensor(
        self,
        name: str,
        value: torch.Tensor,
        axes: Sequence[str],
        *,
        dtypes: Sequence[torch.dtype] = FLOATS,
        same_dtype_as: torch.Tensor | None = None,
    ) -> None:
        """Require a tensor with these axes; a letter seen before must have the size it had before.

        An axis written "..." (only first) stands for any number of leading axes.
        """
        if not isinstance(value, torch.Tensor):
            raise self.fail(f"{name} must be a tensor with axes {_axes(axes)}, given {type(value).__name__}")
        if value.layout != torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            raise self.fail(f"{name} must be a dense tensor, given {layout}; call to_dense()")
        shape = tuple(value.shape)
        letters = axes
        if axes and axes[0] == "...":
            letters = axes[1:]
            shape = shape[len(shape) - len(letters) :] if len(shape) >= len(letters) else shape
        if len(shape) != len(letters):
            raise self.fail(f"{name} must have axes {_axes(axes)}, given shape {tuple(value.shape)}")
        for letter, size in zip(letters, shape, strict=True):
            known = self.sizes.setdefault(letter, size)
            origin = self._origin.setdefault(letter, name)
            if known != size:
                raise self.fail(
                    f"{name} has shape {tuple(value.shape)} for axes {_axes(axes)}, "
                    f"but {letter} = {known} in {origin}"
                )
        if value.dtype not in dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.fail(
                f"{name} must be one of {allowed}, given {str(value.dtype).removeprefix('torch.')}"
            )
        if same_dtype_as is not None and value.dtype != same_dtype_as.dtype:
            raise self.fail(f"{name} is {value.dtype}, but the other inputs are {same_dtype_as.dtype}")
        if self._device is None:
            self._device = (name, value.device)
        elif value.device != self._device[1]:
            raise self.fail(f"{name} is on {value.device}, but {self._device[0]} is on {self._device[1]}")

    def lengths(self, name: str, value: CuSeqlens, letter: str) -> None:
        """Require cumulative lengths whose total is the size of the packed axis `letter`."""
        if not isinstance(value, CuSeqlens):
            raise self.fail(
                f"{name} must be a CuSeqlens (CuSeqlens.from_lengths((37, 70))), given {type(value).__name__}"
            )
        if value.total != self.sizes[letter]:
            raise self.fail(
                f"{name} covers {value.total} tokens, "
                f"but {self._origin[letter]} has {letter} = {self.sizes[letter]}"
            )

    def multiple(self, letter: str, of: str) -> None:
        """Require one axis size to be a positive multiple of another's."""
        size, base = self.sizes[letter], self.sizes[of]
        if base == 0 or size == 0 or size % base:
            raise self.fail(
                f"{letter} = {size} ({self._origin[letter]}) must be a positive multiple of "
                f"{of} = {base} ({self._origin[of]})"
            )

    def positive(self, letter: str) -> None:
        """Require an axis of at least one entry."""
        if self.sizes[letter] == 0:
            raise self.fail(f"{self._origin[letter]} has {letter} = 0; at least 1 is needed")

    def whole(self, name: str, value: object, least: int, most: int | None = None, letter: str = "") -> None:
        """Require a whole number in [least, most]; letter: the axis whose size `most` is."""
        allowed = (
            f"of at least {least}" if most is None else f"from {least} to {letter and f'{letter} = '}{most}"
        )
        number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
        if number is None or number < least or (most is not None and number > most):
            raise self.fail(f"{name} must be a whole number {allowed}, given {value!r}")
        self.require(number <= _LARGEST, f"{name} must be at most {_LARGEST}, given {value!r}")

    def number(self, name: str, value: object) -> None:
        """Require a finite number."""
        if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
            raise self.fail(f"{name} must be a finite number, given {value!r}")
        if isinstance(value, Integral) and abs(int(value)) > _LARGEST:
            raise self.fail(f"{name} is a whole number of more than 64 bits, {value!r}; write it as a float")

    def flags(self, **values: object) -> None:
        """Require True or False for each; what counts as true in Python, such as "no", is refused."""
        for name, value in values.items():
            self.require(isinstance(value, bool), f"{name} must be True or False, given {value!r}")

    def not_negative(self, name: str, value: float) -> None:
        """Require a finite number of at least 0."""
        self.number(name, value)
        self.require(value >= 0, f"{name} must not be negative, given {value}")

    def same_shape(self, name: str, value: torch.Tensor, other: str, like: torch.Tensor) -> None:
        """Require two tensors of any leading axes to have the same shape."""
        if value.shape != like.shape:
            raise self.fail(
                f"{name} has shape {tuple(value.shape)}, {other} has {tuple(like.shape)}; they must be equal"
            )

    def require(self, holds: bool, message: str) -> None:
        """Refuse with a message unless a condition holds."""
        if not holds:
            raise self.fail(message)

    def bind(self, letter: str, size: int, origin: str) -> None:
        """Fix the size of an axis that no tensor gave, naming what did."""
        self.sizes[letter] = size
        self._origin[letter] = origin

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        cu_seqlens: CuSeqlens | None = None,
    ) -> Call:
        """Describe the call whose tensors were checked, the main one first."""
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        main = tensors[0]
        return Call(self.op, main.device.type, main.dtype, self.sizes, options, cu_seqlens, needs_grad)


def _axes(axes: Sequence[str]) -> str:
    return "[" + ", ".join(axes) + "]"

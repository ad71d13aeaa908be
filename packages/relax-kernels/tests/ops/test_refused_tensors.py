"""Every tensor of every operator: another device, dtype or number of axes is refused by name."""

from typing import Any

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import Target
from relax_kernels.testing.isolation_cases import CALLS

ON = Target("torch", "cpu")
ARGUMENTS = [
    (op, name)
    for op, make in CALLS.items()
    for name, (_, x) in make(ON, torch.float32).inputs.items()
    if isinstance(x, torch.Tensor)
]


def call(name: str, argument: str, change: Any) -> None:
    made = CALLS[name](ON, torch.float32)
    inputs = {name: x for name, (_, x) in made.inputs.items()}
    inputs[argument] = change(inputs[argument].detach())
    getattr(rk, name.split("-")[0])(**inputs, **made.options)


WITH_OTHERS = [(op, name) for op, name in ARGUMENTS if sum(other == op for other, _ in ARGUMENTS) > 1]


@pytest.mark.parametrize(("op", "argument"), WITH_OTHERS)
def test_another_device_is_refused(op: str, argument: str) -> None:
    with pytest.raises(rk.InvalidInput, match=rf"{argument} is on "):
        call(op, argument, lambda x: x.to("meta"))


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_another_dtype_is_refused(op: str, argument: str) -> None:
    with pytest.raises(rk.InvalidInput, match=rf"{argument} must be one of .*, given complex64"):
        call(op, argument, lambda x: x.to(torch.complex64))


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_a_sparse_tensor_is_refused(op: str, argument: str) -> None:
    with pytest.raises(rk.InvalidInput, match=rf"{argument} must be a dense tensor, given sparse_coo"):
        call(op, argument, lambda x: x.to_sparse())


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_a_number_is_refused(op: str, argument: str) -> None:
    with pytest.raises(rk.InvalidInput, match=rf"{argument} must be a tensor with axes .*, given float"):
        call(op, argument, lambda x: 1.0)


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_no_axes_are_refused(op: str, argument: str) -> None:
    with pytest.raises(rk.InvalidInput, match=rf"{argument} (must have axes|has shape) .*\(\)"):
        call(op, argument, lambda x: x.flatten()[0])

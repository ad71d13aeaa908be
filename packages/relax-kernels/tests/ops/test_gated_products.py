import math

import pytest
import relax_kernels as rk
import torch
import torch.nn.functional as F
from relax_kernels.testing import NotServed, Target, assert_near, tolerance


def run(target: Target, *args):
    try:
        return target.run(*args)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_swiglu_by_hand(target: Target) -> None:
    gate_up = torch.tensor([0.0, math.log(3.0), 7.0, 8.0], device=target.device).repeat_interleave(8)[None]
    y = run(target, "swiglu", gate_up)
    # sigmoid(log 3) = 3 / 4.
    assert_near(y[0, [0, 15]].cpu(), torch.tensor([0.0, math.log(3.0) * 0.75 * 8.0]), 1e-6)


def test_swiglu_equals_torch(target: Target) -> None:
    x = target.normal(5, 3, 64, seed=1)
    expected = F.silu(x[..., :32]) * x[..., 32:]
    assert_near(run(target, "swiglu", x), expected, tolerance(torch.float32, target.device))


def test_output_gate_equals_torch(target: Target) -> None:
    x, gate = target.normal(5, 64, seed=1), target.normal(5, 64, seed=2)
    expected = x * torch.sigmoid(gate)
    assert_near(run(target, "output_gate", x, gate), expected, tolerance(torch.float32, target.device))


def test_gates_far_from_zero_stay_finite(target: Target) -> None:
    x = torch.tensor([-1e4, -100.0, 100.0, 1e4], device=target.device).repeat_interleave(8).requires_grad_()
    for y in (run(target, "swiglu", x[None]), run(target, "output_gate", x[None], x[None])):
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all()
        assert grad.isfinite().all()


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    x, gate = on.normal(3, 6, seed=1, dtype=f64), on.normal(3, 6, seed=2, dtype=f64)
    assert torch.autograd.gradcheck(lambda x: rk.swiglu(x, backend="torch"), (x,))
    assert torch.autograd.gradcheck(lambda x, z: rk.output_gate(x, z, backend="torch"), (x, gate))


def test_bad_inputs_are_refused_by_name() -> None:
    with pytest.raises(rk.InvalidInput, match="gate_up has 7 features; an even number is needed"):
        rk.swiglu(torch.zeros(3, 7))
    with pytest.raises(rk.InvalidInput, match=r"gate has shape \(1, 8\); it must be \(3, 8\)"):
        rk.output_gate(torch.zeros(3, 8), torch.zeros(1, 8))
    with pytest.raises(rk.InvalidInput, match="gate is torch"):
        rk.output_gate(torch.zeros(3, 8), torch.zeros(3, 8).double())

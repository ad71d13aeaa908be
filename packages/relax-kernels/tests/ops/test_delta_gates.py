import math

import pytest
import relax_kernels as rk
import torch
import torch.nn.functional as F
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance


def run(target: Target, *args):
    try:
        return target.run("delta_gates", *args)
    except NotServed as reason:
        pytest.skip(str(reason))


def inputs(target: Target, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    a, b = (target.normal(33, 4, seed=seed, dtype=dtype) for seed in (1, 2))
    return [a, b, target.normal(4, seed=3), target.normal(4, seed=4)]


def test_by_hand(target: Target) -> None:
    # softplus(log 3) = log 4 and sigmoid(log 3) = 3 / 4; a rate of e^(log 2) doubles the decay.
    a, b = torch.tensor([[math.log(3.0)]], device=target.device), torch.tensor([[math.log(3.0)]])
    rate = torch.tensor([math.log(2.0)], device=target.device)
    g, beta = run(target, a - 5.0, b.to(target.device), rate, torch.full_like(rate, 5.0))
    assert_near(g.cpu(), torch.tensor([[-2 * math.log(4.0)]]), 1e-6)
    assert_near(beta.cpu(), torch.tensor([[0.75]]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_layer_of_transformers(target: Target, dtype: torch.dtype) -> None:
    """The two lines of `Qwen3_5GatedDeltaNet.forward`, whose A_log and dt_bias are float32."""
    a, b, A_log, dt_bias = x = inputs(target, dtype)
    outputs = run(target, *x)
    expected = (-A_log.exp() * F.softplus(a.float() + dt_bias), b.sigmoid())
    assert [y.dtype for y in outputs] == [y.dtype for y in expected]
    allowed = tolerance(dtype, target.device)
    for mine, other in zip(outputs, expected, strict=True):
        assert_near(mine, other, allowed)
    for mine, other in zip(grads_of(outputs, x), grads_of(expected, x), strict=True):
        assert_near(mine, other, allowed)


def test_gates_far_from_zero_stay_finite(target: Target) -> None:
    a = torch.tensor([[-1e4, -100.0, 100.0, 1e4]], device=target.device).requires_grad_()
    zero = torch.zeros(4, device=target.device, requires_grad=True)
    g, beta = run(target, a, a, zero, zero)
    assert g.tolist() == [[0.0, pytest.approx(0.0, abs=1e-40), -100.0, -1e4]]
    assert beta.tolist() == [[0.0, pytest.approx(0.0, abs=1e-40), 1.0, 1.0]]
    assert all(grad.isfinite().all() for grad in grads_of((g, beta), (a, zero)))


def test_runs_give_equal_bits(target: Target) -> None:
    x = inputs(target)
    first, second = (run(target, *x) for _ in range(2))
    for a, b in zip((*first, *grads_of(first, x)), (*second, *grads_of(second, x)), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    x = [on.normal(*s, seed=i, dtype=f64) for i, s in enumerate([(5, 3), (5, 3), (3,), (3,)])]
    assert torch.autograd.gradcheck(lambda *x: rk.delta_gates(*x, backend="torch"), x)


def test_bad_inputs_are_refused_by_name() -> None:
    a, U = torch.zeros(5, 4), torch.zeros(4)
    rk.delta_gates(a, a, U, U)
    with pytest.raises(rk.InvalidInput, match=r"delta_gates: b_TU has shape \(5, 3\)"):
        rk.delta_gates(a, torch.zeros(5, 3), U, U)
    with pytest.raises(rk.InvalidInput, match="delta_gates: b_TU is torch"):
        rk.delta_gates(a, a.double(), U, U)
    with pytest.raises(rk.InvalidInput, match=r"delta_gates: A_log_U has shape \(5,\)"):
        rk.delta_gates(a, a, torch.zeros(5), U)
    with pytest.raises(rk.InvalidInput, match="delta_gates: dt_bias_U must be one of"):
        rk.delta_gates(a, a, U, U.int())
    with pytest.raises(rk.InvalidInput, match=r"delta_gates: a_TU must have axes \[T, U\]"):
        rk.delta_gates(U, U, U, U)

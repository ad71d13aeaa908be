import pytest
import relax_kernels as rk
import torch
import torch.nn.functional as F
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance

CU = rk.CuSeqlens.from_lengths


def run(target: Target, *args, **kwargs):
    try:
        return target.run("causal_conv1d", *args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_by_hand(target: Target) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0], device=target.device)[:, None].repeat(1, 16)
    weight = torch.tensor([100.0, 10.0, 1.0], device=target.device).repeat(16, 1)
    y, state = run(target, x, weight, cu_seqlens=CU((3, 2)), activation=None, output_final_state=True)
    assert y[:, 0].tolist() == [1.0, 12.0, 123.0, 10.0, 120.0]
    assert state[:, 0].tolist() == [[2.0, 3.0], [10.0, 20.0]]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("boundary", range(1, 9))
def test_no_row_sees_its_neighbours_tail(target: Target, boundary: int, width: int) -> None:
    cu = CU((boundary, 9 - boundary))
    x, weight = target.normal(9, 16, seed=1), target.normal(16, width, seed=2)
    y, _ = run(target, x, weight, cu_seqlens=cu)
    alone = [
        F.silu(F.conv1d(part.T[None], weight[:, None], padding=width - 1, groups=16)[0, :, : len(part)].T)
        for part in x.split(cu.lengths)
    ]
    allowed = tolerance(torch.float32, target.device)
    assert_near(y, torch.cat(alone), allowed)
    mine = torch.autograd.grad(y.square().sum(), (x, weight), retain_graph=True)
    theirs = torch.autograd.grad(torch.cat(alone).square().sum(), (x, weight))
    for a, b in zip(mine, theirs, strict=True):
        assert_near(a, b, allowed)
    (grad,) = torch.autograd.grad(y[boundary:].sum(), x, retain_graph=True)
    assert torch.equal(grad[:boundary], torch.zeros_like(grad[:boundary]))
    spoilt = x.detach().clone()
    spoilt[:boundary] = torch.nan
    again, _ = run(target, spoilt, weight, cu_seqlens=cu)
    assert torch.equal(again[boundary:], y[boundary:])


def test_equals_padded_conv1d_of_torch(target: Target) -> None:
    x, weight, bias = target.normal(70, 32, seed=1), target.normal(32, 4, seed=2), target.normal(32, seed=3)
    y, _ = run(target, x, weight, bias, cu_seqlens=CU((70,)))
    conv = F.conv1d(x.T[None], weight[:, None], bias, padding=3, groups=32)[0, :, :70]
    assert_near(y, F.silu(conv).T, tolerance(torch.float32, target.device))


def test_step_equals_the_update_of_transformers(target: Target) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x, state = target.normal(3, 32, seed=1).detach(), target.normal(3, 32, 3, seed=2).detach()
    weight, bias = target.normal(32, 4, seed=3).detach(), target.normal(32, seed=4).detach()
    try:
        y, after = target.run("causal_conv1d_step", x, state, weight, bias)
    except NotServed as reason:
        pytest.skip(str(reason))
    changed = state.clone()
    expected = theirs.torch_causal_conv1d_update(x[..., None], changed, weight, bias)
    assert_near(y, expected[..., 0], tolerance(torch.float32, target.device))
    assert torch.equal(after, changed)


def test_steps_are_the_whole_even_when_shorter_than_the_taps(target: Target) -> None:
    x, weight = target.normal(2, 16, seed=1).detach(), target.normal(16, 4, seed=2).detach()
    initial = target.normal(1, 16, 3, seed=3).detach()
    whole, final = run(
        target, x, weight, cu_seqlens=CU((2,)), initial_state_NCW=initial, output_final_state=True
    )
    state = initial
    for t in range(2):
        y, state = rk.causal_conv1d_step(x[t : t + 1], state, weight)
        assert_near(whole[t : t + 1], y, tolerance(torch.float32, target.device))
    assert torch.equal(state, final)


def test_runs_give_equal_bits(target: Target) -> None:
    x, weight = target.normal(70, 32, seed=1), target.normal(32, 4, seed=2)
    first, second = (run(target, x, weight, cu_seqlens=CU((33, 37)))[0] for _ in range(2))
    assert torch.equal(first, second)
    for a, b in zip(grads_of((first,), (x, weight)), grads_of((second,), (x, weight)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["silu", None])
def test_gradients_of_the_reference_are_those_of_finite_differences(activation) -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    cu = CU((5, 0, 1, 3))
    x = [on.normal(*s, seed=i, dtype=f64) for i, s in enumerate([(9, 3), (3, 4), (3,), (4, 3, 3)])]

    def function(x, weight, bias, initial):
        return rk.causal_conv1d(
            x,
            weight,
            bias,
            cu_seqlens=cu,
            activation=activation,
            initial_state_NCW=initial,
            output_final_state=True,
            backend="torch",
        )

    assert torch.autograd.gradcheck(function, x)


REFUSED = {
    "weight_CW has shape (3, 4)": {"weight_CW": torch.zeros(3, 4)},
    "weight_CW has W = 1 taps": {"weight_CW": torch.zeros(4, 1)},
    "bias_C has shape (5,)": {"bias_C": torch.zeros(5)},
    "activation must be 'silu' or None, given 'gelu'": {"activation": "gelu"},
    "initial_state_NCW has shape (2, 4, 4)": {"initial_state_NCW": torch.zeros(2, 4, 4)},
    "initial_state_NCW is torch.float64": {"initial_state_NCW": torch.zeros(2, 4, 3).double()},
    "cu_seqlens covers 9 tokens": {"cu_seqlens": CU((9,))},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_inputs_are_refused_by_name(message: str) -> None:
    good = {"x_TC": torch.zeros(10, 4), "weight_CW": torch.zeros(4, 4), "cu_seqlens": CU((4, 6))}
    rk.causal_conv1d(**good)
    with pytest.raises(rk.InvalidInput) as refusal:
        rk.causal_conv1d(**good | REFUSED[message])
    assert message in str(refusal.value)


STEP_REFUSED = {
    "weight_CW has shape (3, 4)": {"weight_CW": torch.zeros(3, 4)},
    "bias_C has shape (5,)": {"bias_C": torch.zeros(5)},
    "activation must be 'silu' or None, given 'gelu'": {"activation": "gelu"},
    "state_NCW has shape (2, 4, 4)": {"state_NCW": torch.zeros(2, 4, 4)},
    "state_NCW has shape (3, 4, 3)": {"state_NCW": torch.zeros(3, 4, 3)},
    "state_NCW is torch.float64": {"state_NCW": torch.zeros(2, 4, 3).double()},
    "x_NC must have axes [N, C], given shape (2, 4, 1)": {"x_NC": torch.zeros(2, 4, 1)},
}


@pytest.mark.parametrize("message", STEP_REFUSED)
def test_bad_inputs_of_the_step_are_refused_by_name(message: str) -> None:
    good = {"x_NC": torch.zeros(2, 4), "state_NCW": torch.zeros(2, 4, 3), "weight_CW": torch.zeros(4, 4)}
    rk.causal_conv1d_step(**good)
    with pytest.raises(rk.InvalidInput) as refusal:
        rk.causal_conv1d_step(**good | STEP_REFUSED[message])
    assert message in str(refusal.value)

"""AdamW: what is refused, and weights that are split into bfloat16 and the rest."""

import pytest
import relax_kernels as rk
import torch

OPTIONS = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0}


def test_the_first_step_is_the_sign_of_the_gradient_by_hand() -> None:
    weight, mean, square = torch.tensor([1.0, 1.0]), torch.zeros(2), torch.zeros(2)
    rk.adamw_step(weight, torch.tensor([3.0, -0.5]), mean, square, **OPTIONS)
    assert weight.tolist() == pytest.approx([0.9, 1.1])
    assert mean.tolist() == pytest.approx([0.3, -0.05])
    assert square.tolist() == pytest.approx([0.09, 0.0025])


def test_split_weights_come_back_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(1)).to(
        torch.int32
    )
    x = bits.view(torch.float32)
    x = torch.cat([x[x.isfinite() & (x.abs() < 3e38)], torch.tensor([0.0, -0.0, 1.0, 1.00390625, -1e-40])])
    upper, rest = rk.split_float32(x)
    assert torch.equal(rk.join_float32(upper, rest).view(torch.int32), x.view(torch.int32))
    step = 2.0 ** (x.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert bool(((upper.float() - x).abs() <= step / 2).all())
    exact = torch.randn(100).bfloat16()
    assert torch.equal(rk.split_float32(exact.float())[0], exact)


def test_a_split_weight_keeps_updates_below_the_resolution_of_bfloat16() -> None:
    weight, rest = rk.split_float32(torch.ones(3))
    mean, square = torch.zeros(3), torch.zeros(3)
    for step in range(1, 41):
        rk.adamw_step(weight, torch.ones(3), mean, square, rest, **{**OPTIONS, "step": step, "lr": 1e-4})
    assert rk.join_float32(weight, rest).tolist() == pytest.approx([1 - 40e-4] * 3, rel=1e-6)
    assert weight.tolist() == [0.99609375] * 3


def test_what_does_not_fit_is_refused() -> None:
    x, half = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(rk.InvalidInput, match="weight_N must be one of float32, float64, given bfloat16"):
        rk.adamw_step(half, x, x, x, **OPTIONS)
    with pytest.raises(rk.InvalidInput, match="weight_N must be one of bfloat16, given float32"):
        rk.adamw_step(x, x, x, x, torch.zeros(4, dtype=torch.int16), **OPTIONS)
    with pytest.raises(rk.InvalidInput, match="step counts from 1, given 0"):
        rk.adamw_step(x, x, x, x, **{**OPTIONS, "step": 0})
    with pytest.raises(rk.InvalidInput, match="must be contiguous"):
        rk.adamw_step(torch.zeros(8)[::2], x, x, x, **OPTIONS)

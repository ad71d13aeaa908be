"""AdamW: what is refused, weights split into bfloat16 and the rest, and means that are rounded at random."""

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import NotServed, Target, assert_near

OPTIONS = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0}


def test_the_first_step_is_the_sign_of_the_gradient_by_hand() -> None:
    weight, mean, square = torch.tensor([1.0, 1.0]), torch.zeros(2), torch.zeros(2)
    rk.adamw_step(weight, torch.tensor([3.0, -0.5]), mean, square, **OPTIONS)
    assert weight.tolist() == pytest.approx([0.9, 1.1])
    assert mean.tolist() == pytest.approx([0.3, -0.05])
    assert square.tolist() == pytest.approx([0.09, 0.0025])


def test_split_weights_come_back_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1)).int()
    half_way = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 1, 0x7F7FFFFF], dtype=torch.int32)
    x = torch.cat([bits, half_way]).view(torch.float32)
    x = torch.cat([x[~x.isnan()], torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    upper, rest = rk.split_float32(x)
    assert torch.equal(rk.join_float32(upper, rest).view(torch.int32), x.view(torch.int32))
    # The nearest; where two are, the one of larger magnitude.
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[~tie], x.bfloat16()[~tie])
    assert (upper[tie].double().abs() > x[tie].double().abs()).all()
    assert tie.sum() >= 3


def test_a_split_nan_stays_nan() -> None:
    """Also the one that CUDA computes, all bits 1, of which rounding would make -0."""
    x = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    upper, rest = rk.split_float32(x)
    assert upper.isnan().all()
    assert rk.join_float32(upper, rest).isnan().all()


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
    with pytest.raises(rk.InvalidInput, match="step must be a whole number of at least 1, given 0"):
        rk.adamw_step(x, x, x, x, **{**OPTIONS, "step": 0})
    with pytest.raises(rk.InvalidInput, match=r"beta2 must be in \[0, 1\), given 1.0"):
        rk.adamw_step(x, x, x, x, **{**OPTIONS, "beta2": 1.0})
    with pytest.raises(rk.InvalidInput, match="seed must be a whole number from 0 to 4294967295, given -1"):
        rk.adamw_step(x, x, x, x, **OPTIONS, seed=-1)
    with pytest.raises(rk.InvalidInput, match="first must be a whole number of at least 0, given -1"):
        rk.adamw_step(x, x, x, x, **OPTIONS, first=-1)
    for scale in (torch.ones(1), torch.tensor(1), torch.tensor(1.0, device="meta")):
        with pytest.raises(rk.InvalidInput, match=r"grad_scale must be a number or .* of shape \(\) on cpu"):
            rk.adamw_step(x, x, x, x, **OPTIONS, grad_scale=scale)
    with pytest.raises(rk.InvalidInput, match="must be contiguous"):
        rk.adamw_step(torch.zeros(8)[::2], x, x, x, **OPTIONS)


NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 1}


def run(target: Target, *tensors: torch.Tensor | None, **changes) -> None:
    try:
        target.run("adamw_step", *tensors, **NUMBERS | changes)
    except NotServed as reason:
        pytest.skip(str(reason))


def shard(target: Target, size: int = 1000) -> list[torch.Tensor]:
    """Weight, gradient, means and rest at the beginning, 10 bytes a parameter."""
    weight, grad = (target.normal(size, seed=seed, dtype=torch.bfloat16).detach() for seed in (1, 2))
    zeros = torch.zeros_like(weight)
    return [weight, grad, zeros, zeros.clone(), zeros.to(torch.int16)]


def test_twenty_steps_of_a_split_weight_are_those_of_torch_in_float64(target: Target) -> None:
    weight, _, _, _, rest = shard(target)
    mean, square = (torch.zeros(1000, device=target.device) for _ in range(2))
    parameter = torch.nn.Parameter(weight.double())
    other = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 21):
        grad = target.normal(1000, seed=10 + step).detach()
        parameter.grad = grad.double()
        other.step()
        run(target, weight, grad, mean, square, rest, step=step)
    # float32 rounds weights of up to 4 by up to 2.4e-7 in each step.
    assert_near(rk.join_float32(weight, rest), parameter, 1e-6)


def test_weight_decay_at_small_rates_is_not_rounded_away(target: Target) -> None:
    """1 - 1e-8 is 1 in float32; added to the step before it is rounded, the decay counts on average."""
    size = 200_000
    start = target.normal(size, seed=1).detach().abs_().add_(1)
    moved = []
    for decay in (0.0, 1e-2):
        weight, grad = start.clone(), target.normal(size, seed=2).detach()
        mean, square = grad.clone(), torch.ones_like(grad)
        run(target, weight, grad, mean, square, lr=1e-6, weight_decay=decay, step=10)
        moved.append(weight.double() - start.double())
    decayed = float((moved[0] - moved[1]).sum() / start.double().sum())
    # The mean of 200 000 roundings by up to 1.2e-7 of weights of 1.8 is good to 2e-10.
    assert decayed == pytest.approx(1e-8, abs=1e-9)


def test_a_nan_gradient_shows_in_weight_and_means(target: Target) -> None:
    weight, grad, mean, square, rest = shard(target, 4)
    grad[2] = torch.nan
    run(target, weight, grad, mean, square, rest)
    for x in (weight, mean, square):
        assert x.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_that_lies_on_the_device_gives_the_bits_of_the_number(target: Target, dtype) -> None:
    numbers, tensors = shard(target), shard(target)
    scale = torch.tensor(0.3, dtype=dtype, device=target.device)
    for step in (1, 2):
        run(target, *numbers, grad_scale=0.3, step=step)
        run(target, *tensors, grad_scale=scale, step=step)
    assert all(torch.equal(a, b) for a, b in zip(numbers, tensors, strict=True))


@pytest.mark.parametrize("split", [False, True])
def test_where_the_scale_on_the_device_is_nan_nothing_changes(target: Target, split: bool) -> None:
    tensors = shard(target) if split else [x.float() for x in shard(target)[:4]]
    run(target, *tensors)
    before = [x.clone() for x in tensors]
    tensors[1].fill_(torch.nan)
    scale = torch.tensor(torch.nan, device=target.device)
    run(target, *tensors, grad_scale=scale, step=2)
    for number in (0, 2, 3, 4)[: len(tensors) - 1]:
        assert torch.equal(tensors[number], before[number]), number


def test_a_skipped_step_on_a_device_keeps_the_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's way where it cannot look at the scale, which on the host it can."""
    monkeypatch.setattr("relax_kernels.torch_backend.adam.on_host", lambda scale: False)
    on = Target("torch", "cpu")
    tensors = shard(on)
    run(on, *tensors)
    before = [x.clone() for x in tensors]
    run(on, *tensors, grad_scale=torch.tensor(torch.nan), step=2)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    run(on, *tensors, grad_scale=torch.tensor(0.3), step=2)
    run(on, *before, grad_scale=0.3, step=2)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.77])
def test_random_rounding_has_the_right_mean(target: Target, fraction: float) -> None:
    """beta = 0 and the gradient's factor make a mean whatever number we like."""
    size, above = 200_000, 1 + 2.0**-7
    value = 1 + fraction * 2.0**-7
    # Five standard deviations of the mean of so many draws, all with fixed seeds.
    allowed = 5 * (fraction * (1 - fraction) / size) ** 0.5
    weight, grad, mean, square, rest = shard(target, size)
    run(target, weight, -torch.ones_like(grad), mean, square, rest, beta1=0.0, grad_scale=value)
    assert ((mean == -above) | (mean == -1)).all()
    assert (mean == -above).double().mean().item() == pytest.approx(fraction, abs=allowed)
    run(target, weight, torch.ones_like(grad), mean, square, rest, beta2=0.0, grad_scale=value**0.5)
    assert ((square == above) | (square == 1)).all()
    assert (square == above).double().mean().item() == pytest.approx(fraction, abs=allowed)


def test_random_bits_of_steps_seeds_neighbours_and_means_are_independent(target: Target) -> None:
    """Correlations of which way numbers half-way between bfloat16 ones are rounded."""
    size, half_way = 100_000, 1 + 2.0**-8

    def up(*, of_square: bool = False, **changes) -> torch.Tensor:
        weight, grad, mean, square, rest = shard(target, size)
        scale = half_way**0.5 if of_square else half_way
        changes = {"beta1": 0.0, "beta2": 0.0, "grad_scale": scale} | changes
        run(target, weight, torch.ones_like(grad), mean, square, rest, **changes)
        return torch.where((square if of_square else mean) > 1, 1.0, -1.0).cpu()

    base = up()
    others = [up(step=2), up(seed=1), up(first=1), up(of_square=True), base.roll(1), base.roll(1024)]
    for other in others:
        assert abs(float((base * other).mean())) < 5 / size**0.5


def test_slow_squares_fall_at_their_rate(target: Target) -> None:
    """beta2 = 0.999 takes 0.1 % a step, a quarter of a bfloat16 step there: nothing, to nearest."""
    tensors = shard(target, 4096)
    tensors[1].zero_()
    tensors[3].fill_(1.0)
    for step in range(1, 501):
        run(target, *tensors, beta2=0.999, step=step)
    # 4096 walks of 500 steps, each rounded by 0.2 %, are 4 % off one by one and 0.07 % on average.
    assert tensors[3].double().mean().item() == pytest.approx(0.999**500, rel=3.5e-3)


def test_a_step_repeated_or_split_into_shards_gives_equal_bits(target: Target) -> None:
    whole, again, parts = (shard(target) for _ in range(3))
    run(target, *whole, seed=3, first=40)
    run(target, *again, seed=3, first=40)
    run(target, *(x[:300] for x in parts), seed=3, first=40)
    run(target, *(x[300:] for x in parts), seed=3, first=340)
    for a, b, c in zip(whole, again, parts, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_slices_of_the_reference_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Target("torch", "cpu")
    whole, sliced = shard(on), shard(on)
    run(on, *whole)
    monkeypatch.setattr("relax_kernels.torch_backend.adam.SLICE", 64)
    run(on, *sliced)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))

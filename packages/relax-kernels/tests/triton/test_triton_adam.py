"""The random rounding of the triton AdamW is the reference's, bit by bit."""

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import Target, assert_near
from relax_kernels.testing.adam_cases import OPTIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZE = 100_003


def step(
    backend: str, grad_dtype: torch.dtype, seed: int, first: int, device: str = "cuda"
) -> list[torch.Tensor]:
    """Return the weight, put together again, mean and square after one step."""
    on = Target(backend, device)
    weight, rest = rk.split_float32(on.normal(SIZE, seed=1).detach())
    grad = on.normal(SIZE, seed=2, dtype=grad_dtype).detach()
    mean = on.normal(SIZE, seed=3, dtype=torch.bfloat16).detach()
    square = on.normal(SIZE, seed=4).detach().square().bfloat16()
    rk.adamw_step(
        weight, grad, mean, square, rest,
        step=7, seed=seed, first=first, grad_scale=0.3, backend=backend, **OPTIONS,
    )  # fmt: skip
    return [rk.join_float32(weight, rest), mean, square]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "first"), [(0, 0), (2**32 - 5, 2**32 - 77), (12345, 2**31 - 50_000)])
def test_rounds_as_the_reference(grad_dtype: torch.dtype, seed: int, first: int) -> None:
    weight, *states = step("triton", grad_dtype, seed, first)
    expected, *expected_states = step("torch", grad_dtype, seed, first)
    assert_near(weight, expected, 2e-6)
    for mine, theirs in zip(states, expected_states, strict=True):
        # A product and a sum in one rounding may cross a border, about once in 2^16.
        assert (mine == theirs).double().mean() > 0.999
        # A sum of numbers below 8 that all but cancel is as far off as their last float32 digits.
        assert torch.allclose(mine.float(), theirs.float(), rtol=2**-7, atol=2**-22)


def test_another_seed_rounds_otherwise() -> None:
    first, second = (step("triton", torch.float32, seed, 0)[1] for seed in (1, 2))
    assert (first == second).double().mean() < 0.8

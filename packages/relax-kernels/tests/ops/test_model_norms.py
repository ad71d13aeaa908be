import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance
from relax_kernels.testing.compare import assert_parity


def run(target: Target, *args, **kwargs):
    try:
        return target.run(*args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centred_norm_equals_the_module_of_transformers(target: Target, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    module = theirs.Qwen3_5RMSNorm(64, eps=1e-6).to(target.device)
    module.weight.data = target.normal(64, seed=2).detach()
    x = target.normal(9, 2, 64, seed=1, dtype=dtype)
    y = run(target, "rms_norm", x, module.weight, eps=1e-6, zero_centred=True)
    expected = module(x)
    assert y.dtype == expected.dtype
    assert_near(y, expected, tolerance(dtype, target.device))
    for mine, other in zip(
        grads_of((y,), (x, module.weight)), grads_of((expected,), (x, module.weight)), strict=True
    ):
        assert_near(mine, other, tolerance(dtype, target.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_equals_the_module_of_transformers(target: Target, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    module = theirs.Qwen3_5RMSNormGated(64, eps=1e-6).to(target.device, dtype)
    module.weight.data = target.normal(64, seed=2, dtype=dtype).detach()
    x, gate = target.normal(9, 64, seed=1, dtype=dtype), target.normal(9, 64, seed=3, dtype=dtype)
    y = run(target, "gated_rms_norm", x, gate, module.weight, eps=1e-6)
    inputs = (x, gate, module.weight)
    expected = module(x, gate)
    assert_near(y, expected, tolerance(dtype, target.device))
    for mine, other in zip(grads_of((y,), inputs), grads_of((expected,), inputs), strict=True):
        assert_near(mine, other, tolerance(dtype, target.device))


def test_by_hand(target: Target) -> None:
    # The mean square of (3, 4, 0, ..., 0) over 16 features is 25 / 16.
    x = torch.zeros(1, 16, device=target.device)
    x[0, :2] = torch.tensor([3.0, 4.0])
    weight = torch.ones(16, device=target.device)
    plain = run(target, "rms_norm", x, weight, eps=0.0, zero_centred=False)
    centred = run(target, "rms_norm", x, weight, eps=0.0, zero_centred=True)
    assert_near(plain[0, :3].cpu(), torch.tensor([2.4, 3.2, 0.0]), 1e-6)
    assert_near(centred[0, :3].cpu(), torch.tensor([4.8, 6.4, 0.0]), 1e-6)


def test_norm_of_a_sum_by_hand(target: Target) -> None:
    x, residual = torch.zeros(2, 1, 16, device=target.device)
    x[0, 0], residual[0, 0], residual[0, 1] = 1.0, 2.0, 4.0
    weight = torch.ones(16, device=target.device)
    normed, total = run(target, "add_rms_norm", x, residual, weight, eps=0.0, zero_centred=False)
    assert total[0, :3].tolist() == [3.0, 4.0, 0.0]
    assert_near(normed[0, :3].cpu(), torch.tensor([2.4, 3.2, 0.0]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["norm", "sum", "both"])
def test_norm_of_a_sum_is_that_of_an_addition_and_a_norm(
    target: Target, dtype: torch.dtype, used: tuple[int, ...]
) -> None:
    x, residual = (target.normal(9, 2, 64, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = target.normal(64, seed=3, dtype=dtype)
    outputs = run(target, "add_rms_norm", x, residual, weight, eps=1e-6, zero_centred=True)
    total = x + residual
    expected = (run(target, "rms_norm", total, weight, eps=1e-6, zero_centred=True), total)
    allowed = tolerance(dtype, target.device)
    assert_near(outputs[0], expected[0], allowed)
    assert torch.equal(outputs[1], expected[1])
    inputs = (x, residual, weight)
    grads = grads_of([outputs[i] for i in used], inputs)
    expected_grads = grads_of([expected[i] for i in used], inputs)
    assert_parity(grads, expected_grads, allowed, "dx dresidual dweight")
    assert all(grad is None or grad.dtype == dtype for grad in grads)


def test_zero_rows_are_finite(target: Target) -> None:
    x = torch.zeros(2, 64, device=target.device, requires_grad=True)
    y = run(target, "rms_norm", x, torch.ones(64, device=target.device), eps=1e-6, zero_centred=False)
    assert torch.equal(y, torch.zeros_like(y))
    assert all(grad.isfinite().all() for grad in grads_of((y,), (x,)))


def test_rows_of_any_layout(target: Target) -> None:
    """Queries and keys are slices of a fused projection, so rows are not next to one another."""
    wide, weight = target.normal(9, 2, 128, seed=1), target.normal(64, seed=2)
    y = run(target, "rms_norm", wide[..., 64:], weight, eps=1e-6, zero_centred=True)
    same = run(target, "rms_norm", wide[..., 64:].contiguous(), weight, eps=1e-6, zero_centred=True)
    assert torch.equal(y, same)
    (grad,) = torch.autograd.grad(y.sum(), wide)
    assert torch.equal(grad[..., :64], torch.zeros_like(grad[..., :64]))


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    x, gate, weight = (on.normal(*s, seed=i, dtype=f64) for i, s in enumerate([(3, 2, 5), (3, 2, 5), (5,)]))
    for zero_centred in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, w, z=zero_centred: rk.rms_norm(x, w, eps=1e-6, zero_centred=z, backend="torch"),
            (x, weight),
        )
        assert torch.autograd.gradcheck(
            lambda x, r, w, z=zero_centred: rk.add_rms_norm(
                x, r, w, eps=1e-6, zero_centred=z, backend="torch"
            ),
            (x, gate, weight),
        )
    assert torch.autograd.gradcheck(
        lambda x, z, w: rk.gated_rms_norm(x, z, w, eps=1e-6, backend="torch"), (x, gate, weight)
    )


def test_bad_inputs_are_refused_by_name() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(8)
    with pytest.raises(rk.InvalidInput, match=r"rms_norm: weight_D has shape \(7,\)"):
        rk.rms_norm(x, torch.zeros(7), eps=1e-6, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match="rms_norm: eps must not be negative"):
        rk.rms_norm(x, weight, eps=-1.0, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match="rms_norm: x must be one of"):
        rk.rms_norm(x.int(), weight, eps=1e-6, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match=r"gated_rms_norm: gate has shape \(2, 8\)"):
        rk.gated_rms_norm(x, torch.zeros(2, 8), weight, eps=1e-6)
    with pytest.raises(rk.InvalidInput, match=r"add_rms_norm: residual has shape \(2, 8\), x has \(3, 8\)"):
        rk.add_rms_norm(x, torch.zeros(2, 8), weight, eps=1e-6, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match="add_rms_norm: residual is torch"):
        rk.add_rms_norm(x, x.double(), weight, eps=1e-6, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match=r"add_rms_norm: weight_D has shape \(7,\)"):
        rk.add_rms_norm(x, x, torch.zeros(7), eps=1e-6, zero_centred=True)
    with pytest.raises(rk.InvalidInput, match="add_rms_norm: eps must not be negative"):
        rk.add_rms_norm(x, x, weight, eps=-1.0, zero_centred=True)

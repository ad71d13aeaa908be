"""The triton delta rule in the dtype it serves: lengths, gates at their ends, views, and the same bits every
run.
"""

import pytest
import relax_kernels
import torch
from relax_kernels import CuSeqlens
from relax_kernels.testing import Target, assert_near, grads_of, tolerance
from relax_kernels.testing.compare import float64_leaves
from relax_kernels.testing.references import gated_delta_rule as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TARGET = Target("triton", "cuda")
NAMES = ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


def inputs(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int, int],
    decay: tuple[float, float] = (-1.0, 0.0),
    size: float = 1.0,
    beta: tuple[float, float] = (0.0, 1.0),
) -> tuple[torch.Tensor, ...]:
    (H, U, K, V), T = heads, sum(lengths)
    q, k, v = (
        (TARGET.normal(*shape, seed=seed).detach() * size).to(torch.bfloat16).requires_grad_()
        for seed, shape in enumerate(((T, H, K), (T, H, K), (T, U, V)))
    )
    g = TARGET.uniform(T, U, low=decay[0], high=decay[1], seed=4)
    beta_TU = TARGET.uniform(T, U, low=beta[0], high=beta[1], seed=5, dtype=torch.bfloat16)
    return q, k, v, g, beta_TU, TARGET.normal(len(lengths), U, K, V, seed=6)


def results(
    given: tuple[torch.Tensor, ...], lengths: tuple[int, ...], l2norm: bool, run
) -> list[torch.Tensor]:
    *tensors, initial = given
    outputs = run(
        *tensors,
        cu_seqlens=CuSeqlens.from_lengths(lengths),
        initial_state_NUKV=initial,
        output_final_state=True,
        qk_l2norm=l2norm,
    )
    return [*outputs, *grads_of(outputs, given)]


def triton(*args, **kwargs):
    return relax_kernels.gated_delta_rule(*args, **kwargs, backend="triton")


def check(given: tuple[torch.Tensor, ...], lengths: tuple[int, ...], l2norm: bool = True) -> None:
    actual = results(given, lengths, l2norm, triton)
    expected = results(tuple(float64_leaves(given)), lengths, l2norm, reference)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_near(a, e, tolerance(torch.bfloat16, "cuda"), name)


@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (3,),
        (63,),
        (64,),
        (65,),
        (127,),
        (1000,),
        (5, 0, 64, 1, 0, 127, 3),
        (33, 32, 31, 66, 0),
        (1,) * 9,
    ],
)
def test_every_length(lengths: tuple[int, ...]) -> None:
    check(inputs(lengths, (1, 2, 128, 128)), lengths)


@pytest.mark.parametrize(
    "heads",
    [(2, 2, 64, 64), (2, 6, 64, 128), (1, 4, 128, 64), (3, 3, 128, 128), (1, 2, 32, 32), (1, 2, 16, 16)],
)
def test_every_head_shape(heads: tuple[int, int, int, int]) -> None:
    check(inputs((130, 65), heads), (130, 65))


@pytest.mark.parametrize("decay", [(-90.0, -60.0), (0.0, 0.0), (-40.0, 0.0), (-1e-3, 0.0)])
def test_gates_at_their_ends(decay: tuple[float, float]) -> None:
    check(inputs((200, 70), (1, 2, 128, 128), decay), (200, 70))


@pytest.mark.parametrize("beta", [(0.0, 0.0), (1.0, 1.0)])
def test_steps_at_their_ends(beta: tuple[float, float]) -> None:
    check(inputs((200, 70), (1, 2, 128, 128), beta=beta), (200, 70))


def test_large_values() -> None:
    check(inputs((200, 70), (1, 2, 128, 128), size=100.0), (200, 70))


def test_without_l2norm() -> None:
    check(inputs((200, 70), (1, 2, 128, 128), size=0.1), (200, 70), l2norm=False)


def test_views_of_one_projection() -> None:
    lengths = (100, 37)
    dense = inputs(lengths, (2, 4, 64, 64))
    whole = torch.cat([x.detach().reshape(137, -1) for x in dense[:3]], dim=1).requires_grad_()
    q, k, v = whole.split((128, 128, 256), dim=1)
    views = (q.unflatten(1, (2, 64)), k.unflatten(1, (2, 64)), v.unflatten(1, (4, 64)))
    cu = CuSeqlens.from_lengths(lengths)
    o, _ = triton(*views, *dense[3:5], cu_seqlens=cu)
    expected, _ = triton(*dense[:5], cu_seqlens=cu)
    assert torch.equal(o, expected)
    (dwhole,) = torch.autograd.grad(o.float().sum(), whole)
    parts = torch.autograd.grad(expected.float().sum(), dense[:3])
    assert torch.equal(dwhole, torch.cat([x.reshape(137, -1) for x in parts], dim=1))


def test_the_same_bits_every_run() -> None:
    lengths = (1000, 300, 65)
    given = inputs(lengths, (2, 4, 128, 128))
    first = results(given, lengths, True, triton)
    for _ in range(20):
        for name, a, b in zip(NAMES, first, results(given, lengths, True, triton), strict=True):
            assert torch.equal(a, b), name


def test_packed_equals_separate() -> None:
    lengths = (100, 1, 64, 200)
    given = inputs(lengths, (1, 2, 128, 128))
    packed = results(given, lengths, True, triton)[0]
    for n, (start, end) in enumerate(zip((0, 100, 101, 165), (100, 101, 165, 365), strict=True)):
        alone = tuple(x.detach()[start:end] for x in given[:5])
        o, _ = triton(
            *alone, cu_seqlens=CuSeqlens.from_lengths((end - start,)), initial_state_NUKV=given[5][n : n + 1]
        )
        assert torch.equal(o, packed[start:end])

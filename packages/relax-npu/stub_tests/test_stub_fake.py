"""Our operators under FakeTensorMode: torch_npu's meta functions tell shapes, forward and backward."""

from collections.abc import Iterator

import pytest
import relax_kernels
import torch
from relax_kernels import CuSeqlens
from relax_npu.operators import attention
from torch._subclasses.fake_tensor import FakeTensorMode

LENGTHS = CuSeqlens.from_lengths((37, 1, 27))
T = LENGTHS.total
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    attention._mask.cache_clear()
    with FakeTensorMode():
        yield
    attention._mask.cache_clear()


def made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu", requires_grad=True)


def described(x: torch.Tensor) -> tuple:
    return tuple(x.shape), x.dtype, x.device.type


def require_gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    sum(x.float().sum() for x in outputs).backward()
    for x in inputs:
        assert described(x.grad) == described(x)


def test_attention() -> None:
    q, k, v = made(T, 4, 64), made(T, 2, 64), made(T, 2, 64)
    o, lse = relax_kernels.attention(q, k, v, cu_seqlens_q=LENGTHS, return_lse=True, backend="ascend")
    assert described(o) == described(q)
    assert described(lse) == ((T, 4), torch.float32, "npu")
    require_gradients([o, lse], [q, k, v])


def test_norms() -> None:
    x, gate, weight = made(T, 64), made(T, 64), made(64)
    for y in (
        relax_kernels.rms_norm(x, weight, eps=1e-6, zero_centred=True, backend="ascend"),
        relax_kernels.gated_rms_norm(x, gate, weight, eps=1e-6, backend="ascend"),
    ):
        assert described(y) == described(x)
        require_gradients([y], [x, weight])


def test_rotary() -> None:
    x = made(T, 2, 64)
    cos, sin = (torch.empty(T, 32, device="npu") for _ in range(2))
    y = relax_kernels.rotary(x, cos, sin, backend="ascend")
    assert described(y) == described(x)
    require_gradients([y], [x])


def test_swiglu() -> None:
    x = made(T, 64)
    y = relax_kernels.swiglu(x, backend="ascend")
    assert described(y) == ((T, 32), HALF, "npu")
    require_gradients([y], [x])


def test_grouped_matmul() -> None:
    x, weight = made(T, 32), made(4, 48, 32)
    count = torch.empty(4, dtype=torch.int64, device="npu")
    y = relax_kernels.grouped_matmul(x, weight, count, backend="ascend")
    assert described(y) == ((T, 48), HALF, "npu")
    require_gradients([y], [x, weight])

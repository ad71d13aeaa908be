"""Digests tell tensors apart by every bit."""

import os
import subprocess
import sys

import pytest
import torch
from relax_rollout import tensor_digest
from relax_rollout.digest import WHOLE_BYTES, TensorDigests, tensor_digests
from relax_rollout.digest_sums import COLUMNS


def test_equal_bytes_give_equal_digests_whatever_the_layout():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert tensor_digest(tensor) == tensor_digest(tensor.T.contiguous().T)
    assert tensor_digest(tensor) == tensor_digest(tensor.clone().requires_grad_(True))


def test_one_bit_shape_and_dtype_matter():
    tensor = torch.ones(2, 6)
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 3] ^= 1
    digests = {
        tensor_digest(t) for t in (tensor, flipped, tensor.reshape(3, 4), tensor.bfloat16(), tensor.int())
    }
    assert len(digests) == 5
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


def test_scalars_empty_tensors_and_nan_have_digests():
    assert len(tensor_digest(torch.tensor(1.5))) == 16
    assert len(tensor_digest(torch.empty(0, 3))) == 16
    nan = torch.tensor([float("nan")])
    assert tensor_digest(nan) == tensor_digest(nan.clone())


@pytest.fixture(scope="module")
def large():
    """Hashed by sums: more than the limit, with bytes beyond the last row of the table."""
    torch.manual_seed(0)
    return torch.randn(2**19 + 4 * COLUMNS + 3).bfloat16()


@pytest.mark.parametrize("place", [0, 1, 4 * COLUMNS - 1, 4 * COLUMNS, -1, -4 * COLUMNS, 300_001])
def test_one_bit_of_a_large_tensor_matters(large, place):
    flipped = large.clone()
    flipped.view(torch.int16)[place] ^= 1
    assert tensor_digest(flipped) != tensor_digest(large)


ROW = 4 * COLUMNS


@pytest.mark.parametrize(
    "exchanged", [(slice(0, ROW), slice(ROW, 2 * ROW)), (slice(0, 4), slice(4, 8)), (slice(9), slice(90, 99))]
)
def test_order_in_a_large_tensor_matters(large, exchanged):
    a, b = exchanged
    other = large.clone()
    other[a], other[b] = large[b], large[a]
    assert tensor_digest(other) != tensor_digest(large)


def test_order_of_small_whole_numbers_matters():
    """Their upper halves are all zero, and the rows of the table exchange without a change of the columns."""
    numbers = torch.arange(2**18)
    other = torch.cat([numbers[COLUMNS : 2 * COLUMNS], numbers[:COLUMNS], numbers[2 * COLUMNS :]])
    assert tensor_digest(other) != tensor_digest(numbers)


def test_transposing_a_large_tensor_shows():
    square = torch.randn(600, 600)
    assert square.nbytes > WHOLE_BYTES
    assert tensor_digest(square) != tensor_digest(square.T)
    assert tensor_digest(square) == tensor_digest(square.T.contiguous().T)


def test_where_a_large_tensor_lies_does_not_matter(large):
    assert tensor_digest(large[1:]) == tensor_digest(large[1:].clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_sign_of_every_element_of_a_large_tensor_matters(dtype):
    """Sums that wrapped around would lose the highest bits, an even number of times."""
    ones = torch.ones(2**20, dtype=dtype)
    assert tensor_digest(ones) != tensor_digest(-ones)


def test_many_digests_are_those_of_each(large):
    tensors = {"large": large, "scalar": torch.tensor(2.0), "empty": torch.empty(0), "small": torch.ones(7)}
    assert tensor_digests(tensors) == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert tensor_digests({}) == {}


def test_the_same_tensors_are_digested_as_they_are_at_each_call(large):
    """Also where a copy of one must be read: it lies in no order, or at no multiple of eight bytes."""
    kept = {
        "large": large.clone(),
        "turned": torch.ones(300, 200).T,
        "odd": large.clone()[1:],
        "s": torch.ones(3),
    }
    digests = TensorDigests(kept)
    for _ in range(3):
        assert digests() == tensor_digests({name: tensor.clone() for name, tensor in kept.items()})
        for tensor in kept.values():
            tensor[-1] += 1


KERNEL = """
import torch
from relax_rollout.digest_kernel import KernelSums
from relax_rollout.digest_sums import COLUMNS, sums_of
tables = [torch.randint(-(2**63), 2**63 - 1, (rows, COLUMNS)) for rows in (3, 65)]
kernel = KernelSums(tables)
for _ in range(2):
    print(torch.equal(kernel(), sums_of(tables)()))
    tables[1][64, 5] ^= -(2**63)
"""


def test_the_kernel_gives_the_sums_of_the_reference():
    """In Triton's interpreter, which is chosen when kernels are defined."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", KERNEL]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert said == "True\nTrue\n"


class HopperWithoutDevice:
    """Answers what Triton asks its driver before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def test_the_kernel_compiles_for_hopper(monkeypatch):
    """The interpreter takes more than the compiler does."""
    triton = pytest.importorskip("triton")
    from relax_rollout.digest_kernel import KernelSums

    compiled, run = [], triton.runtime.jit.JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", warm_up)
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperWithoutDevice())
    KernelSums([torch.zeros(3, COLUMNS, dtype=torch.int64)])()
    (kernel,) = compiled
    assert kernel.asm["cubin"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_digests_of_a_cuda_device_are_those_of_the_host(large):
    here, there = large, large.cuda()
    both = [
        {"whole": t, "odd": t[1:], "turned": t[:-3].view(-1, 256).T, "small": t[:9]} for t in (here, there)
    ]
    assert tensor_digests(both[0]) == tensor_digests(both[1])

"""Digests tell tensors apart by every bit."""

import torch
from relax_rollout import tensor_digest


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

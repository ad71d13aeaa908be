"""The gradient norm and clipping that stand in for Megatron's local ones."""

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from relax_core.upstream.clip_grads import GRADIENT_PASSES
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def gradients():
    torch.manual_seed(0)
    return [torch.randn(n) for n in (1, 7, 300)] + [torch.randn(4, 5)]


@pytest.fixture(autouse=True)
def _installed(cpu_world):
    GRADIENT_PASSES.install()


class Reads(TorchDispatchMode):
    """Counts numbers read back to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_norm_stays_on_the_device(gradients):
    with Reads() as reads:
        local_multi_tensor_l2_norm(0, None, [gradients], False)
    assert reads.count > 0, "upstream no longer waits for the device: drop the correction"
    with Reads() as reads:
        norm, _ = clip_grads.l2_norm_impl(0, None, [gradients], False)
    assert reads.count == 0
    expected = torch.cat([x.flatten() for x in gradients]).double().norm()
    torch.testing.assert_close(norm.double(), expected.view(1), rtol=1e-6, atol=0)
    assert norm.shape == (1,) and norm.dtype == torch.float32


def test_clipping_is_that_of_upstream_in_place(gradients):
    expected = [x.clone() for x in gradients]
    local_multi_tensor_scale(0, None, [expected, expected], 0.3)
    places = [x.data_ptr() for x in gradients]
    clip_grads.multi_tensor_scale_impl(0, None, [gradients, gradients], 0.3)
    assert [x.data_ptr() for x in gradients] == places
    for mine, other in zip(gradients, expected, strict=True):
        assert torch.equal(mine, other)


def test_scaling_to_other_tensors_leaves_the_first_alone(gradients):
    before, targets = [x.clone() for x in gradients], [torch.empty_like(x) for x in gradients]
    clip_grads.multi_tensor_scale_impl(0, None, [gradients, targets], 2.0)
    for source, target, given in zip(gradients, targets, before, strict=True):
        assert torch.equal(source, given)
        assert torch.equal(target, given * 2)

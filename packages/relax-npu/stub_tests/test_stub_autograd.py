"""torch_npu's own derivatives of the operators that we call equal ours, which call its backward operators.

T tokens, H query heads, G key/value heads, D features, E experts, K choices, P = T * K rows.
"""

import pytest
import torch
from relax_kernels import CuSeqlens, Permutation
from relax_kernels.testing import Target, assert_near, grads_of, tolerance

ASCEND = Target("ascend", "npu")
LENGTHS = CuSeqlens.from_lengths((37, 1, 27))
T = LENGTHS.total
HALF = torch.bfloat16


def copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def compare(ours, theirs, inputs, others, dtype=torch.float32) -> None:
    """Values and gradients of our call and of torch_npu's, from the same kernels: equal but for rounding."""
    for mine, other in zip(
        [ours, *grads_of([ours], inputs)], [theirs, *grads_of([theirs], others)], strict=True
    ):
        assert_near(mine, other.cpu().double(), tolerance(dtype, "npu"))


def test_rms_norm(host) -> None:
    inputs = [ASCEND.normal(T, 64, seed=1), ASCEND.normal(64, seed=2)]
    others = copies(*inputs)
    ours = ASCEND.run("rms_norm", *inputs, eps=1e-6, zero_centred=False)
    theirs, _ = torch.ops.npu.npu_rms_norm(*others, epsilon=1e-6)
    assert "NpuRmsNorm" in type(theirs.grad_fn).__name__
    compare(ours, theirs, inputs, others)
    assert host.executed["npu.npu_rms_norm_backward"] == 2


def test_swiglu(host) -> None:
    inputs = [ASCEND.normal(T, 64, seed=1)]
    others = copies(*inputs)
    ours = ASCEND.run("swiglu", *inputs)
    theirs = torch.ops.npu.npu_swiglu(*others, dim=-1)
    compare(ours, theirs, inputs, others)
    assert host.executed["npu.npu_swiglu_backward"] == 2


def test_rotary(host) -> None:
    """torch_npu has a backward operator of its own; ours turns by the opposite angle."""
    x_THD, angle_TR = ASCEND.normal(T, 2, 64, seed=1), torch.rand(T, 32).npu()
    cos_TR, sin_TR = (torch.cat((f(angle_TR),) * 2, -1) for f in (torch.cos, torch.sin))
    (other,) = copies(x_THD)
    ours = ASCEND.run("rotary", x_THD, cos_TR, sin_TR)
    theirs = torch.ops.npu.npu_rotary_mul(other[None], cos_TR[None, :, None], sin_TR[None, :, None])[0]
    compare(ours, theirs, [x_THD], [other])
    assert host.executed["npu.npu_rotary_mul_backward"] == 1


@pytest.mark.parametrize("causal", [True, False])
def test_attention(host, causal: bool) -> None:
    inputs = [ASCEND.normal(T, heads, 64, seed=seed) for seed, heads in ((1, 4), (2, 2), (3, 2))]
    others = copies(*inputs)
    ours = ASCEND.run("attention", *inputs, cu_seqlens_q=LENGTHS, causal=causal, scale=0.125)
    ends = list(LENGTHS.host[1:])
    hidden = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None
    theirs, *_ = torch.ops.npu.npu_fusion_attention(
        *others,
        4,
        "TND",
        atten_mask=hidden,
        scale=0.125,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=3 if causal else 0,
    )
    compare(ours, theirs, inputs, others)
    assert host.executed["npu.npu_fusion_attention_grad"] == 2


def test_experts_weights_and_rows(host) -> None:
    experts = 4
    chosen_TK = torch.stack((torch.arange(T) % experts, (torch.arange(T) + 1) % experts), 1)
    order_P = chosen_TK.flatten().argsort(stable=True)
    row_P = order_P.argsort()
    count_E = torch.bincount(chosen_TK.flatten(), minlength=experts)
    permutation = Permutation(row_P.view(T, 2).npu(), (order_P // 2).npu(), count_E.npu())
    inputs = [ASCEND.normal(2 * T, 32, seed=1, dtype=HALF), ASCEND.normal(T, 2, seed=2, dtype=HALF)]
    others = copies(*inputs)
    ours = ASCEND.run("unpermute_tokens", inputs[0], permutation, inputs[1])
    rows = row_P.to(torch.int32).npu()
    theirs = torch.ops.npu.npu_moe_token_unpermute(others[0], rows, probs=others[1])
    compare(ours, theirs, inputs, others, HALF)
    assert host.executed["npu.npu_moe_token_unpermute_grad"] == 2


def test_grouped_matmul_gives_no_gradient_by_itself_and_says_nothing(host) -> None:
    """What our own backward pass is there for: torch's fallback lets the gradient end without an error."""
    x, weight = ASCEND.normal(8, 16, seed=1, dtype=HALF), ASCEND.normal(2, 16, 16, seed=2, dtype=HALF)
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([3, 5]).npu(), split_item=3, group_type=0, group_list_type=1
    )
    product.float().sum().backward()
    assert x.grad is None
    assert weight.grad is None

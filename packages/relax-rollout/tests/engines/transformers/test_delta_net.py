"""The engine's delta rule against transformers' own."""

import pytest
import torch
from relax_rollout.engines.transformers.delta_net import (
    PREFILL_CHUNK,
    convolution_step,
    recurrent_step,
    use_fast_delta_rule,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

ROWS, HEADS, DIM = 3, 4, 16


def inputs(length: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(ROWS, length, HEADS, DIM, generator=generator).to(dtype) for _ in range(3))
    g = -torch.rand(ROWS, length, HEADS, generator=generator)
    beta = torch.rand(ROWS, length, HEADS, generator=generator).to(dtype)
    return q, k, v, g, beta


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 64, 70, 130])
def test_a_short_chunk_gives_the_same_result(length):
    q, k, v, g, beta = inputs(length)
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted, wanted_state = upstream.torch_chunk_gated_delta_rule(q, k, v, g, beta, **settings)
    got, got_state = upstream.torch_chunk_gated_delta_rule(
        q, k, v, g, beta, chunk_size=PREFILL_CHUNK, **settings
    )
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(got_state, wanted_state, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalise", [True, False])
def test_steps_equal_transformers_steps(dtype, normalise):
    q, k, v, g, beta = inputs(6, dtype)
    if not normalise:
        q, k = q / 4, k / 4
    state = torch.randn(ROWS, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(0))
    theirs = state.clone()
    for t in range(6):
        now = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        wanted, theirs = upstream.torch_recurrent_gated_delta_rule(*now, theirs, True, normalise)
        got, same = recurrent_step(*now, state, True, normalise)
        assert same is state
        assert got.dtype == wanted.dtype
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(state, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("planes", [False, True])
def test_convolution_steps_equal_transformers_steps(dtype, biased, planes):
    generator = torch.Generator().manual_seed(0)
    tail, weight, inputs = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 8, 4), (8, 4), (6, 3, 8, 1))
    )
    bias = torch.randn(8, generator=generator).to(dtype) if biased else None
    theirs, ours = tail.clone(), tail.clone()
    if planes:
        ours = tail.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for new in inputs:
        wanted = upstream.torch_causal_conv1d_update(new, theirs, weight, bias, "silu")
        got = convolution_step(new, ours, weight, bias, "silu")
        assert got.dtype == wanted.dtype
        tolerance = 1e-6 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
        assert torch.equal(ours, theirs)


def test_only_modules_on_the_plain_rule_are_changed(build_model):
    model = build_model()
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]

    def fast(*args: object) -> None: ...

    layers[0].recurrent_gated_delta_rule = fast
    layers[1].chunk_gated_delta_rule = layers[1].causal_conv1d_update = fast
    assert use_fast_delta_rule(model) == 2
    assert layers[0].recurrent_gated_delta_rule is fast
    assert layers[0].chunk_gated_delta_rule is upstream.torch_chunk_gated_delta_rule
    assert layers[1].chunk_gated_delta_rule is fast
    assert layers[1].recurrent_gated_delta_rule is recurrent_step
    assert layers[1].causal_conv1d_update is fast
    assert layers[2].causal_conv1d_update is convolution_step
    assert layers[2].chunk_gated_delta_rule.keywords == {"chunk_size": PREFILL_CHUNK}

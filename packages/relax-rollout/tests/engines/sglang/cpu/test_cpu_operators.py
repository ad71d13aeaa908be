"""The CPU operators against transformers' own functions, and verification against decoding.

N rows, T tokens, S slots, U value heads, K key dim, V value dim, C channels, W conv width.
"""

import pytest
import torch
import torch.nn.functional as F
from relax_rollout.engines.sglang.cpu import ops
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

LENGTHS = (1, 5, 17)


def packed(seed=0, heads=2, values=4, dim=8):
    torch.manual_seed(seed)
    total = sum(LENGTHS)
    return {
        "q": torch.randn(1, total, heads, dim),
        "k": torch.randn(1, total, heads, dim),
        "v": torch.randn(1, total, values, dim),
        "g": -torch.rand(1, total, values),
        "beta": torch.rand(1, total, values),
    }


def test_prefill_of_packed_rows_is_transformers_rule():
    x = packed()
    pool = torch.randn(7, 4, 8, 8)
    slots = torch.tensor([5, 0, 3])
    before = pool.clone()
    cu = torch.tensor([0, 1, 6, 23], dtype=torch.int32)
    out, _, _ = ops.chunk_gated_delta_rule(
        **x, initial_state=pool, initial_state_indices=slots, cu_seqlens=cu, use_qk_l2norm_in_kernel=True
    )
    for n, slot in enumerate(slots.tolist()):
        part = slice(int(cu[n]), int(cu[n + 1]))
        wanted, state = hf.torch_recurrent_gated_delta_rule(
            x["q"][:, part].repeat_interleave(2, 2),
            x["k"][:, part].repeat_interleave(2, 2),
            x["v"][:, part],
            x["g"][:, part],
            x["beta"][:, part],
            initial_state=before[slot].transpose(-1, -2)[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[:, part], wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pool[slot], state[0].transpose(-1, -2), atol=1e-5, rtol=1e-5)
    untouched = [s for s in range(7) if s not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


def decode_inputs(rows, steps):
    torch.manual_seed(3)
    return {
        "A_log": torch.randn(4),
        "dt_bias": torch.randn(4),
        "q": torch.randn(1, rows * steps, 2, 8),
        "k": torch.randn(1, rows * steps, 2, 8),
        "v": torch.randn(1, rows * steps, 4, 8),
        "a": torch.randn(rows * steps, 4),
        "b": torch.randn(rows * steps, 4),
        "use_qk_l2norm_in_kernel": True,
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "cu_seqlens": torch.arange(rows + 1) * steps,
    }


@pytest.mark.parametrize("accepted", [(0, 0), (1, 3), (2, 0), (3, 3)])
def test_the_state_after_partial_acceptance_is_that_of_plain_decoding(accepted):
    steps, rows = 4, 2
    x = decode_inputs(rows, steps)
    slots = torch.tensor([4, 1])
    start = torch.randn(6, 4, 8, 8)
    verified, plain = start.clone(), start.clone()
    buffer = torch.full((9, steps, 4, 8, 8), torch.nan)
    out = ops.fused_sigmoid_gating_delta_rule_update(
        **x,
        initial_state_source=verified,
        initial_state_indices=slots,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.arange(9),
        cache_steps=steps,
    )
    assert torch.equal(verified, start)
    last = torch.tensor(accepted)
    ops.fused_mamba_state_scatter_with_mask(verified[None], buffer[None], slots, last)
    for row in range(rows):
        for step in range(accepted[row] + 1):
            at = row * steps + step
            one = {name: x[name][:, at : at + 1] for name in "qkv"}
            one |= {name: x[name][at : at + 1] for name in "ab"}
            got = ops.fused_sigmoid_gating_delta_rule_update(
                **(x | one | {"cu_seqlens": torch.tensor([0, 1])}),
                initial_state_source=plain,
                initial_state_indices=slots[row : row + 1],
            )
            torch.testing.assert_close(got[0, 0], out[0, at], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(verified, plain, atol=1e-6, rtol=1e-6)


def test_the_convolution_of_packed_rows_then_steps_is_the_whole_one():
    torch.manual_seed(1)
    channels, width = 6, 4
    weight, rows = torch.randn(channels, width), [torch.randn(channels, n + 3) for n in LENGTHS]
    pool = torch.randn(5, channels, width - 1)
    slots = torch.tensor([2, 0, 4])
    cu = torch.tensor([0, 1, 6, 23])
    x = torch.cat([row[:, :n] for row, n in zip(rows, LENGTHS, strict=True)], dim=1)
    first = ops.causal_conv1d_fn(
        x,
        weight,
        activation="silu",
        conv_states=pool,
        has_initial_state=torch.zeros(3, dtype=torch.bool),
        cache_indices=slots,
        query_start_loc=cu,
    )
    steps = [
        ops.causal_conv1d_update(
            torch.stack([row[:, n + k] for row, n in zip(rows, LENGTHS, strict=True)]),
            pool,
            weight,
            activation="silu",
            conv_state_indices=slots,
        )
        for k in range(3)
    ]
    for n, row in enumerate(rows):
        wanted = F.silu(F.conv1d(F.pad(row[None], (width - 1, 0)), weight[:, None], groups=channels))[0]
        got = torch.cat([first[:, cu[n] : cu[n + 1]], torch.stack([s[n] for s in steps], 1)], 1)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_the_window_after_partial_acceptance_is_that_of_plain_decoding(accepted):
    torch.manual_seed(2)
    weight, drafted = torch.randn(6, 4), torch.randn(1, 4, 6).transpose(1, 2)
    start, slot = torch.randn(3, 6, 3), torch.tensor([1])
    verified, plain = start.clone(), start.clone()
    # SGLang may keep the windows overlapping in one buffer; verification must fill them all the same.
    shared = torch.full((2, 6, 4 + 2), torch.nan)
    windows = shared.as_strided((2, 4, 6, 3), (36, 1, 6, 1))
    out = ops.causal_conv1d_update(
        drafted,
        verified,
        weight,
        activation="silu",
        conv_state_indices=slot,
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.arange(2),
    )
    assert torch.equal(verified, start)
    assert out.stride() == drafted.stride()
    ops.fused_mamba_state_scatter_with_mask(verified[None], windows[None], slot, torch.tensor([accepted]))
    for step in range(accepted + 1):
        x = drafted[:, :, step]
        got = ops.causal_conv1d_update(x, plain, weight, activation="silu", conv_state_indices=slot)
        torch.testing.assert_close(got, out[:, :, step], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(verified, plain)


def test_gated_norm_is_transformers():
    torch.manual_seed(0)
    norm = hf.Qwen3_5RMSNormGated(16, eps=1e-6)
    norm.weight.data = torch.randn(16)
    x, z = torch.randn(9, 16), torch.randn(9, 16)
    got = ops.rms_norm_gated(x=x, weight=norm.weight, bias=None, z=z, eps=1e-6)
    torch.testing.assert_close(got, norm(x, z), atol=1e-6, rtol=1e-6)


def test_head_norm_is_transformers():
    torch.manual_seed(0)
    norm = hf.Qwen3_5RMSNorm(8, eps=1e-6)
    norm.weight.data = torch.randn(8)
    q_gate, k = torch.randn(5, 3 * 16), torch.randn(5, 8)
    q, k_out, gate = ops.fused_qk_gemma_rmsnorm_with_gate(q_gate, k, norm.weight, norm.weight, 1e-6, 8, 3)
    heads = q_gate.view(5, 3, 16)
    torch.testing.assert_close(q.view(5, 3, 8), norm(heads[..., :8]))
    assert torch.equal(gate.view(5, 3, 8), heads[..., 8:])
    torch.testing.assert_close(k_out, norm(k))

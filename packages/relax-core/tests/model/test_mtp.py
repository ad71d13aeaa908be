"""Draft layers against a forward pass written here from the published architecture, and what their gradient
reaches.

Axes: T tokens, D hidden, H query heads, G key/value heads, E head features.
"""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.packing import PackedLayout

LENGTHS = (7, 1, 12, 2)


def build(config_of, depths: int, **options):
    config = config_of(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], mtp_num_hidden_layers=depths
    )
    torch.manual_seed(1)
    model = build_model(Qwen35Config.from_hf(config), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "A_log" in name or "dt_bias" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale)
    return config, model


def ahead(tokens_T, layout, depths):
    return [layout.shift(tokens_T, depth + 1) for depth in range(depths)]


def norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


def rotate(x_THE, base=10000.0, part=0.5):
    tokens, size = x_THE.shape[0], int(x_THE.shape[-1] * part)
    angle = torch.arange(tokens)[:, None] * base ** -(torch.arange(0, size, 2).float() / size)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x_THE[..., : size // 2], x_THE[..., size // 2 : size], x_THE[..., size:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def draft_layer(w, hidden_TD, embedding_TD, config):
    """One depth for one sample: w maps our parameter names of the depth to tensors."""
    groups, heads, size = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    tokens, per = hidden_TD.shape[0], heads // groups
    x = (
        torch.cat([norm(embedding_TD, w["enorm.weight"]), norm(hidden_TD, w["hnorm.weight"])], -1)
        @ w["eh_proj.weight"].T
    )
    a = "transformer_layer.self_attention."
    fused = norm(x, w["transformer_layer.input_layernorm.weight"]) @ w[a + "linear_qkv.weight"].T
    q, gate, k, v = fused.view(tokens, groups, -1).split([per * size, per * size, size, size], -1)
    q = rotate(norm(q.reshape(tokens, heads, size), w[a + "q_layernorm.weight"]))
    k = rotate(norm(k, w[a + "k_layernorm.weight"])).repeat_interleave(per, 1)
    scores = torch.einsum("the,she->hts", q, k) / size**0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hts,she->the", scores.softmax(-1), v.repeat_interleave(per, 1)).reshape(tokens, -1)
    x = x + (out * gate.reshape(tokens, -1).sigmoid()) @ w[a + "linear_proj.weight"].T
    mlp = {n.removeprefix("transformer_layer.mlp."): p for n, p in w.items() if ".mlp." in n}
    x = x + feed_forward(mlp, norm(x, w["transformer_layer.pre_mlp_layernorm.weight"]))
    return norm(x, w["final_layernorm.weight"])


def feed_forward(w, x_TD):
    """A dense feed-forward, or one with experts, each token taking two."""
    if "router.weight" not in w:
        return swiglu(x_TD, w["linear_fc1.weight"], w["linear_fc2.weight"])
    share_TK, expert_TK = (x_TD @ w["router.weight"].T).softmax(-1).topk(2, dim=-1)
    share_TK = share_TK / share_TK.sum(-1, keepdim=True)
    fc1, fc2 = w["experts.linear_fc1.weight"], w["experts.linear_fc2.weight"]
    routed = [
        sum(share * swiglu(x, fc1[e], fc2[e]) for share, e in zip(shares, experts, strict=True))
        for x, shares, experts in zip(x_TD, share_TK, expert_TK.tolist(), strict=True)
    ]
    shared = swiglu(x_TD, w["shared_experts.linear_fc1.weight"], w["shared_experts.linear_fc2.weight"])
    return torch.stack(routed) + (x_TD @ w["shared_experts.gate_weight"].T).sigmoid() * shared


def swiglu(x, gate_up, down):
    g, u = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(g) * u) @ down.T


@pytest.mark.parametrize(("depths", "family"), [(1, "dense"), (2, "dense"), (3, "dense"), (2, "moe")])
def test_every_depth_equals_an_independent_forward_pass(cpu_world, config_of, moe_config_of, depths, family):
    make = moe_config_of if family == "moe" else config_of
    config, model = build(make, depths, mtp=MtpConfig(detach_embedding=False, detach_trunk=False))
    layout = PackedLayout.build(LENGTHS, pad_to_multiple=8)
    samples = [torch.randint(0, 96, (n,)) for n in LENGTHS]
    tokens_T = layout.pack(samples, dtype=torch.int64)
    trunk_TD = torch.randn(layout.padded_total, config["hidden_size"], requires_grad=True)
    ours = model.mtp_hidden(trunk_TD, ahead(tokens_T, layout, depths), layout)
    assert len(ours) == model.mtp_depths == depths

    named = dict(model.named_parameters())
    seeds = [torch.randn(layout.padded_total, config["hidden_size"]) for _ in range(depths)]
    expected_loss, checked = 0.0, 0
    for i, tokens in enumerate(samples):
        hidden_TD = layout.unpack(trunk_TD)[i]
        for depth in range(depths):
            prefix = f"mtp.layers.{depth}."
            weights = {name.removeprefix(prefix): p for name, p in named.items() if name.startswith(prefix)}
            reach = len(tokens) - depth - 1
            if reach < 1:
                break
            embedding_TD = named["embedding.word_embeddings.weight"][tokens[depth + 1 :]]
            hidden_TD = draft_layer(weights, hidden_TD[:reach], embedding_TD, config)
            mine = layout.unpack(ours[depth])[i][:reach]
            torch.testing.assert_close(mine, hidden_TD, rtol=0, atol=2e-5)
            expected_loss = expected_loss + (hidden_TD * layout.unpack(seeds[depth])[i][:reach]).sum()
            checked += reach
    assert checked > 10

    parameters = [*(p for n, p in named.items() if n.startswith(("mtp.", "embedding."))), trunk_TD]
    expected = torch.autograd.grad(expected_loss, parameters)
    loss = sum(
        (mine * seed)[layout.ahead(depth + 1)[1]].sum()
        for depth, (mine, seed) in enumerate(zip(ours, seeds, strict=True))
    )
    for got, want in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)), ids=str)
def test_detached_parts_get_exactly_no_gradient_and_others_do(cpu_world, config_of, flags, tied):
    detach = dict(zip(("detach_embedding", "detach_trunk", "detach_head"), flags, strict=True))
    _, model = build(lambda **c: config_of(**c, tie_word_embeddings=tied), 2, mtp=MtpConfig(**detach))
    layout = PackedLayout.build(LENGTHS)
    tokens_T = torch.randint(0, 96, (layout.total,))
    # Labels are tokens of another part of the vocabulary than the inputs, so that a tied weight's two uses
    # differ by row.
    target_T = torch.where(layout.ahead(2)[1], 0, -1)
    tokens_T.clamp_(min=1)
    hidden = model.mtp_hidden(model(tokens_T, layout), ahead(tokens_T, layout, 2), layout)
    sum(-model.token_logprobs(h, target_T, detach_head=flags[2]).logprob_T.sum() for h in hidden).backward()

    def moved(prefix):
        grads = [p.grad for n, p in model.named_parameters() if n.startswith(prefix)]
        return any(g is not None and bool(g.abs().max() > 0) for g in grads)

    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n.startswith("mtp."))
    assert moved("decoder.") is not detach["detach_trunk"]
    embedding = model.embedding.word_embeddings.weight.grad
    if tied:
        # Row 0 is never an input: only the head's use of the weight can move it. Unused rows see the head's
        # softmax.
        assert (embedding is not None and bool(embedding[0].abs().max() > 0)) is not detach["detach_head"]
        if all(flags):
            assert embedding is None or embedding.abs().max() == 0
    else:
        assert moved("output_layer.") is not detach["detach_head"]
        assert moved("embedding.") is not (detach["detach_embedding"] and detach["detach_trunk"])


def test_the_default_detaches_everything():
    assert MtpConfig().model_dump() == {
        "layers": None, "init": None, "loss_coefficient": 0.1, "repeated": 1, "only": False,
        "detach_embedding": True, "detach_trunk": True, "detach_head": True,
    }  # fmt: skip


def test_the_trunk_is_the_same_with_and_without_draft_layers(cpu_world, config_of):
    _, with_drafts = build(config_of, 2)
    _, without = build(config_of, 0)
    named = dict(with_drafts.named_parameters())
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            parameter.copy_(named[name])
    layout, tokens_T = PackedLayout.build((5, 3)), torch.randint(0, 96, (8,))
    assert torch.equal(with_drafts(tokens_T, layout), without(tokens_T, layout))
    assert without.mtp_depths == 0
    assert without.mtp_hidden(without(tokens_T, layout), [], layout) == []


def test_a_repeated_layer_gives_what_several_layers_of_its_weights_give(cpu_world, config_of):
    _, several = build(config_of, 3)
    _, one = build(config_of, 1, mtp=MtpConfig(repeated=3))
    named = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in several.named_parameters():
            parameter.copy_(named[re.sub(r"mtp.layers.\d", "mtp.layers.0", name)])
    layout, tokens_T = PackedLayout.build(LENGTHS), torch.randint(0, 96, (sum(LENGTHS),))
    hidden_TD, ahead_T = one(tokens_T, layout), ahead(tokens_T, layout, 3)
    assert one.mtp_depths == 3
    got, wanted = one.mtp_hidden(hidden_TD, ahead_T, layout), several.mtp_hidden(hidden_TD, ahead_T, layout)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    sum(h.sum() for h in got).backward()
    sum(h.sum() for h in wanted).backward()
    gradient = sum(layer.eh_proj.weight.grad for layer in several.mtp.layers)
    torch.testing.assert_close(one.mtp.layers[0].eh_proj.weight.grad, gradient, rtol=1e-5, atol=1e-5)

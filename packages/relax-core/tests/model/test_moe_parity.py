"""The model with experts against transformers' Qwen3.5 MoE: logits and every gradient, float32.

Axes: T tokens, D hidden, E experts, K experts of each token.
"""

import pytest
import torch
from relax_bridge import model_map
from relax_core.model import Qwen35Config, build_model, named_weights
from relax_core.packing import PackedLayout

LENGTHS = (1, 63, 64, 65)


def spread_weights(model) -> None:
    """Weights none of which is trivial, with routers that tell tokens apart."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if "norm" in name else 0.5 if "router" in name or "embedding" in name else 0.08
            weight.copy_(torch.randn_like(weight) * scale)
            if name.endswith("A_log"):
                weight.uniform_(-3, 0)


def pair(config: dict):
    """(our model, transformers' model with the same weights)."""
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    ours = build_model(Qwen35Config.from_hf(config))
    spread_weights(ours)
    exported = dict(model_map(config).export_tensors(dict(named_weights(ours))))
    theirs = Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**config, attn_implementation="eager", experts_implementation="eager")
    )
    result = theirs.load_state_dict(exported, strict=False)
    assert not result.missing_keys
    assert all(name.startswith("mtp.") for name in result.unexpected_keys)
    return ours, theirs


@pytest.mark.parametrize("depths", [0, 1])
def test_names_and_shapes_are_those_of_the_weight_map(cpu_world, moe_config_of, depths):
    config = moe_config_of(mtp_num_hidden_layers=depths)
    model = build_model(Qwen35Config.from_hf(config))
    ours = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    assert ours == model_map(config).megatron_shapes()


def test_named_weights_are_views_of_the_parameters(cpu_world, moe_config_of):
    model = build_model(Qwen35Config.from_hf(moe_config_of()))
    for _name, weight in named_weights(model):
        weight.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (150,)], ids=str)
def test_logits_and_gradients_equal_transformers(cpu_world, moe_config_of, lengths):
    config = moe_config_of()
    ours, theirs = pair(config)
    tokens = [torch.randint(0, 96, (n,)) for n in lengths]
    weights = [torch.randn(n, 96) / max(64, sum(lengths)) for n in lengths]
    expected = [theirs(t[None], use_cache=False).logits[0] for t in tokens]
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()

    logits = ours.logits(ours(torch.cat(tokens), PackedLayout.build(lengths)))
    (logits * torch.cat(weights)).sum().backward()
    assert logits.std() > 0.3
    # float32: the two sum in another order; the largest differences seen are 4e-6.
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(gradients[name])
    exported = dict(model_map(config).export_tensors(dict(named_weights(ours))))
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            exported[name], parameter.grad, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_shape_of_the_published_model_is_read():
    from transformers import Qwen3_5MoeTextConfig

    theirs = Qwen3_5MoeTextConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    ours = Qwen35Config.from_hf(theirs.to_dict())
    assert (ours.experts, ours.experts_per_token) == (256, 8)
    assert (ours.ffn_size, ours.shared_ffn_size, ours.hidden_size) == (512, 512, 2048)
    assert (ours.num_layers, ours.attention_heads, ours.kv_heads) == (40, 16, 2)

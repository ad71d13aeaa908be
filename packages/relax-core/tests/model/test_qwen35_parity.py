"""The model against transformers' Qwen3.5: logits and every gradient, float32."""

import pytest
import torch
from relax_core.model import Qwen35Config, build_model
from relax_core.packing import PackedLayout

LENGTHS = (1, 63, 64, 65, 150)


def hf_model(config: dict):
    """transformers' model with random weights, none of them trivial."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    torch.manual_seed(3)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.copy_(torch.rand_like(parameter) * 3 - 3)
            else:
                wide = name.endswith(("conv1d.weight", "in_proj_qkv.weight", "embed_tokens.weight"))
                parameter.copy_(torch.randn_like(parameter) * (0.4 if wide else 0.06))
    return model


def megatron_tensors(named: dict, config: dict) -> dict:
    """Hugging Face tensors (weights or gradients) under our names, by the plain rules of the weight map."""
    groups, heads, width = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    out = {
        "embedding.word_embeddings.weight": named["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": named["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = named["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        hf, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        out[ours + "input_layernorm.weight"] = named[hf + "input_layernorm.weight"]
        out[ours + "pre_mlp_layernorm.weight"] = named[hf + "post_attention_layernorm.weight"]
        out[ours + "mlp.linear_fc1.weight"] = torch.cat(
            [named[f"{hf}mlp.{n}_proj.weight"] for n in ("gate", "up")]
        )
        out[ours + "mlp.linear_fc2.weight"] = named[hf + "mlp.down_proj.weight"]
        mixer = ours + "self_attention."
        if hf + "self_attn.q_proj.weight" in named:
            hf += "self_attn."
            q = named[hf + "q_proj.weight"].view(groups, heads // groups, 2, width, -1)
            k, v = (named[f"{hf}{n}_proj.weight"].view(groups, 1, width, -1) for n in "kv")
            out[mixer + "linear_qkv.weight"] = torch.cat([q[:, :, 0], q[:, :, 1], k, v], 1).flatten(0, 2)
            out[mixer + "linear_proj.weight"] = named[hf + "o_proj.weight"]
            for n in "qk":
                out[f"{mixer}{n}_layernorm.weight"] = named[f"{hf}{n}_norm.weight"]
        else:
            hf += "linear_attn."
            out[mixer + "in_proj.weight"] = torch.cat(
                [named[f"{hf}in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a")]
            )
            for theirs, mine in (
                ("conv1d.weight", "conv1d.weight"),
                ("A_log", "A_log"),
                ("dt_bias", "dt_bias"),
                ("norm.weight", "out_norm.weight"),
                ("out_proj.weight", "out_proj.weight"),
            ):
                out[mixer + mine] = named[hf + theirs]
    return out


def copy_weights(model, tensors: dict) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, *((n,) for n in LENGTHS)], ids=str)
def test_logits_and_gradients_equal_transformers(cpu_world, config_of, tied, lengths):
    config = config_of(tie_word_embeddings=tied)
    theirs = hf_model(config)
    ours = build_model(Qwen35Config.from_hf(config))
    copy_weights(ours, megatron_tensors(dict(theirs.named_parameters()), config))

    tokens = [torch.randint(0, 96, (n,)) for n in lengths]
    weights = [torch.randn(n, 96) / max(64, sum(lengths)) for n in lengths]
    expected = [theirs(t[None], use_cache=False).logits[0] for t in tokens]
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()

    layout = PackedLayout.build(lengths)
    logits = ours.logits(ours(torch.cat(tokens), layout))
    (logits * torch.cat(weights)).sum().backward()

    assert logits.std() > 0.3
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)
    gradients = megatron_tensors({n: p.grad for n, p in theirs.named_parameters()}, config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )

"""A checkpoint that transformers saved, imported: the trainer computes what transformers does, and its draft
layer what a forward pass written from the published names does.

Axes: T tokens, D hidden, H query heads, G key/value heads, E head features.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from relax_bridge import Checkpoint, import_shards, model_map
from relax_core.model import Qwen35Config, build_model
from relax_core.packing import PackedLayout
from safetensors.torch import save_file

EPS = 1e-6


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def imported(request, cpu_world, config_of, tmp_path):
    """The trainer's model, transformers' model, the checkpoint of both and its config."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = config_of(mtp_num_hidden_layers=1, tie_word_embeddings=request.param)
    torch.manual_seed(3)
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    table = model_map(config)
    # transformers saves no draft layer: its published names are added here.
    stored = {
        name: x for name, x in theirs.state_dict().items() if not (request.param and name == "lm_head.weight")
    }
    mtp = {name: shape for name, shape in table.hf_shapes().items() if name.startswith("mtp.")}
    stored |= {name: torch.randn(shape) * (0.15 if len(shape) > 1 else 0.3) for name, shape in mtp.items()}
    stored = {name: x.clone().contiguous() for name, x in stored.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Checkpoint.open(tmp_path)
    ours = build_model(Qwen35Config.from_hf(config), random_weights=False)
    parameters = dict(ours.named_parameters())
    for _ in import_shards(table, source, into=lambda shard: parameters[shard.name]):
        pass
    return ours, theirs.eval(), source, config


def test_logits_equal_transformers(imported):
    ours, theirs, _source, config = imported
    tokens_T = torch.arange(20) * 7 % config["vocab_size"]
    hidden_TD = ours(tokens_T, PackedLayout.build((20,)))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.logits(hidden_TD), theirs(tokens_T[None]).logits[0], rtol=0, atol=1e-4
        )


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight)


def rotate(x_THE, part, base):
    tokens, size = x_THE.shape[0], int(x_THE.shape[-1] * part)
    angle = torch.arange(tokens)[:, None] * base ** -(torch.arange(0, size, 2).float() / size)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x_THE[..., : size // 2], x_THE[..., size // 2 : size], x_THE[..., size:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def published_draft(w, hidden_TD, embedding_TD, config):
    """The published `mtp.*` as vLLM and SGLang read it: fc takes [embedding; hidden], q_proj is [query; gate]
    per head."""
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rope = config["rope_parameters"]
    part, base, tokens = rope["partial_rotary_factor"], rope["rope_theta"], len(hidden_TD)
    joined = [
        norm(embedding_TD, w["pre_fc_norm_embedding.weight"]),
        norm(hidden_TD, w["pre_fc_norm_hidden.weight"]),
    ]
    x_TD = torch.cat(joined, -1) @ w["fc.weight"].T
    at = "layers.0.self_attn."
    y_TD = norm(x_TD, w["layers.0.input_layernorm.weight"])
    q_THE, gate_THE = (y_TD @ w[at + "q_proj.weight"].T).view(tokens, heads, 2 * size).chunk(2, dim=-1)
    k_TGE, v_TGE = ((y_TD @ w[f"{at}{x}_proj.weight"].T).view(tokens, groups, size) for x in "kv")
    q_THE = rotate(norm(q_THE, w[at + "q_norm.weight"]), part, base)
    k_THE = rotate(norm(k_TGE, w[at + "k_norm.weight"]), part, base).repeat_interleave(heads // groups, 1)
    scores = torch.einsum("the,she->hts", q_THE, k_THE) / size**0.5
    seen = torch.ones(tokens, tokens).tril().bool()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    o_THE = torch.einsum("hts,she->the", weights, v_TGE.repeat_interleave(heads // groups, 1))
    x_TD = x_TD + (o_THE * gate_THE.sigmoid()).reshape(tokens, -1) @ w[at + "o_proj.weight"].T
    y_TD = norm(x_TD, w["layers.0.post_attention_layernorm.weight"])
    gated = F.silu(y_TD @ w["layers.0.mlp.gate_proj.weight"].T) * (y_TD @ w["layers.0.mlp.up_proj.weight"].T)
    return norm(x_TD + gated @ w["layers.0.mlp.down_proj.weight"].T, w["norm.weight"])


def test_the_draft_layer_equals_a_forward_pass_from_the_published_names(imported):
    ours, _theirs, source, config = imported
    tokens_T, layout = torch.arange(15) * 5 % config["vocab_size"], PackedLayout.build((15,))
    with torch.no_grad():
        hidden_TD = ours(tokens_T, layout)
        ahead_T = layout.shift(tokens_T, 1)
        (draft_TD,) = ours.mtp_hidden(hidden_TD, [ahead_T], layout)
    w = {name.removeprefix("mtp."): source.tensor(name) for name in source.names if name.startswith("mtp.")}
    embedding_TD = source.tensor("model.embed_tokens.weight")[ahead_T]
    want_TD = published_draft(w, hidden_TD, embedding_TD, config)
    # The last position has no next token, so its input has no meaning.
    torch.testing.assert_close(draft_TD[:-1], want_TD[:-1], rtol=0, atol=1e-4)

"""The config of a checkpoint: what is read, and what is refused by name."""

import pytest
from relax_core.model import Qwen35Config, UnsupportedModelError


def test_sizes_are_read(config_of):
    config = Qwen35Config.from_hf(config_of(mtp_num_hidden_layers=2, tie_word_embeddings=True))
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.num_layers, config.mtp_layers, config.tied) == (4, 2, True)
    assert (config.rotary_dim, config.rope_base, config.head_dim) == (8, 10000.0, 16)
    assert (config.attention_heads, config.kv_heads) == (4, 2)
    assert (
        config.delta_key_heads,
        config.delta_value_heads,
        config.delta_key_dim,
        config.delta_value_dim,
    ) == (2, 4, 8, 12)


def test_it_reads_what_transformers_writes():
    from transformers import Qwen3_5TextConfig

    theirs = Qwen3_5TextConfig(
        num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 1e7}
    )
    ours = Qwen35Config.from_hf(theirs.to_dict())
    assert list(ours.layer_types) == theirs.layer_types
    assert (ours.hidden_size, ours.ffn_size, ours.vocab_size) == (4096, 12288, 248320)
    assert ours.rotary_dim == 64
    assert ours.rope_base == 1e7


def test_older_spellings_are_read(config_of):
    config = config_of(rope_theta=5e5, partial_rotary_factor=0.25, full_attention_interval=2)
    del config["rope_parameters"]
    read = Qwen35Config.from_hf(config)
    assert (read.rope_base, read.rotary_dim) == (5e5, 4)
    assert read.layer_types == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 8}, "num_experts is set: models with experts are of type 'qwen3_5_moe_text'"),
        ({"model_type": "qwen3_5"}, "model_type is 'qwen3_5': only"),
        ({"model_type": "llama", "text_config": {}}, "model_type is 'llama': only"),
        ({"model_type": "llama"}, "model_type is 'llama': only 'qwen3_5_text' and 'qwen3_5_moe_text'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn': only 'default'"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is True: only False"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads 4 is not a multiple"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 4"),
        ({"layer_types": ["mamba"] * 4}, "layer_types holds mamba"),
        ({"hidden_size": 0}, "hidden_size must be positive integers"),
        ({"head_dim": "16"}, "head_dim is '16': it must be a positive integer"),
        ({"head_dim": 0}, "head_dim is 0: it must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': it must be a number above 0"),
        ({"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers is '1': it must be an integer of at least 0"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention': it must be a list of names"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]: it must be an object"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big': it must be a number above 0"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(config_of, change, text):
    with pytest.raises(UnsupportedModelError, match=text):
        Qwen35Config.from_hf(config_of(**change))


def test_the_text_model_inside_a_model_with_vision_is_read(config_of, moe_config_of):
    from transformers import Qwen3_5MoeConfig

    whole = Qwen3_5MoeConfig(
        text_config={"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10]}}
    ).to_dict()
    read = Qwen35Config.from_hf(whole)
    assert (read.experts, read.experts_per_token, read.num_layers) == (256, 8, 40)
    for kind, plain in (("qwen3_5", config_of()), ("qwen3_5_moe", moe_config_of())):
        inner = {key: value for key, value in plain.items() if key != "tie_word_embeddings"}
        for tied in (False, True):
            nested = {"model_type": kind, "vision_config": {}, "text_config": inner}
            nested["tie_word_embeddings"] = tied
            assert Qwen35Config.from_hf(nested) == Qwen35Config.from_hf(plain | {"tie_word_embeddings": tied})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": None}, "num_experts must be positive integers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is above num_experts 6"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False: only True"),
        ({"mlp_only_layers": [0]}, "only experts in every layer"),
        ({"decoder_sparse_step": 2}, "only experts in every layer"),
    ],
)
def test_experts_that_cannot_be_built_are_refused_by_name(moe_config_of, change, text):
    with pytest.raises(UnsupportedModelError, match=text):
        Qwen35Config.from_hf(moe_config_of(**change))


def test_all_problems_are_named_at_once(config_of):
    with pytest.raises(UnsupportedModelError) as error:
        Qwen35Config.from_hf(config_of(num_experts=8, attention_bias=True, num_key_value_heads=3))
    for text in ("num_experts", "attention_bias", "num_key_value_heads"):
        assert text in str(error.value)

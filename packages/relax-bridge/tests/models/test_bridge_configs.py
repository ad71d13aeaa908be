"""What a model config must say, and the refusals."""

from importlib.metadata import entry_points

import pytest
from relax_bridge import ConfigError, model_map
from relax_bridge.models import GROUP
from relax_bridge.models.published import PUBLISHED
from relax_bridge.partition import Component, Split


def test_the_tables_are_found_by_entry_point():
    names = {entry.name for entry in entry_points(group=GROUP)}
    assert {
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
    } <= names


def test_an_unknown_model_type_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"model_type 'llama'; installed: .*qwen3_5,"):
        model_map({"model_type": "llama"})
    with pytest.raises(ConfigError, match="model_type None"):
        model_map({})


def test_missing_sizes_are_named_at_once(tiny_config):
    config = tiny_config(hidden_size=None, head_dim=-1)
    del config["vocab_size"]
    with pytest.raises(ConfigError, match="vocab_size = None, hidden_size = None, head_dim = -1"):
        model_map(config)


QWEN3 = {"model_type": "qwen3_moe", "mtp_num_hidden_layers": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"full_attention_interval": None}, "neither layer_types nor full_attention_interval"),
        ({"layer_types": ["full_attention"]}, "1 kinds for num_hidden_layers = 4"),
        ({"layer_types": ["mamba"] * 4}, r"holds \['mamba'\]"),
        ({"layer_types": 5}, "layer_types must be a list; got 5"),
        ({"layer_types": [["mamba"], 1, None, "x"]}, "holds .*None"),
        ({"mtp_num_hidden_layers": "1"}, "MTP layers must be a whole number, 0 or more; got '1'"),
        ({"mtp_num_hidden_layers": 1.5}, "got 1.5"),
        ({"mtp_num_hidden_layers": True}, "got True"),
        ({"mtp_num_hidden_layers": [1]}, r"got \[1\]"),
        ({"mtp_num_hidden_layers": -1}, "got -1"),
        ({"text_config": "x"}, "text_config must be an object; got 'x'"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false; got 'false'"),
        ({"model_type": ["qwen3_5"]}, r"no weight map for model_type \['qwen3_5'\]"),
        (QWEN3 | {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers; got 3"),
        (QWEN3 | {"mlp_only_layers": ["0"]}, r"mlp_only_layers must be a list of layer numbers; got \['0'\]"),
        (QWEN3 | {"decoder_sparse_step": "2"}, "positive integers; got decoder_sparse_step = '2'"),
        (QWEN3 | {"decoder_sparse_step": -1}, "positive integers; got decoder_sparse_step = -1"),
        ({"num_attention_heads": 3}, "num_attention_heads = 3 is no multiple of num_key_value_heads = 2"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is no multiple"),
    ],
)
def test_configs_the_table_cannot_describe_are_refused(tiny_config, change, message):
    with pytest.raises(ConfigError, match=message):
        model_map(tiny_config(**change))


def test_a_negative_number_of_mtp_layers_is_refused(tiny_config):
    with pytest.raises(ConfigError, match="0 or more; got -1"):
        model_map(tiny_config(), mtp_layers=-1)


def test_qwen3_has_no_mtp(tiny_config):
    with pytest.raises(ConfigError, match="qwen3 has no multi-token prediction; got 1"):
        model_map(tiny_config(model_type="qwen3", mtp_num_hidden_layers=0), mtp_layers=1)


def test_layer_types_win_over_the_interval(tiny_config):
    config = tiny_config(layer_types=["full_attention"] + ["linear_attention"] * 3)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in model_map(config).megatron_shapes()


def test_a_config_that_is_silent_about_mtp_is_settled_by_the_names(tiny_config):
    config = tiny_config()
    del config["mtp_num_hidden_layers"]
    assert model_map(config).mtp_layers == 0
    assert model_map(config, names=["mtp.layers.0.input_layernorm.weight"]).mtp_layers == 1


@pytest.mark.parametrize("size", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_published_sizes_divide_over_tensor_parallel_ranks(size, tp):
    for entry in model_map(PUBLISHED[size]).entries:
        if isinstance(entry.partition, Split):
            for part in entry.partition.components:
                assert isinstance(part, Component)
                assert part.size // part.unit % tp == 0, entry.megatron


def test_the_delta_net_is_cut_inside_q_k_v_z_b_a():
    (entry,) = (
        entry
        for entry in model_map(PUBLISHED["Qwen3.5-9B"]).entries
        if entry.megatron == "decoder.layers.0.self_attention.in_proj.weight"
    )
    sizes = {part.name: part.size for part in entry.partition.components}
    assert sizes == {"q": 2048, "k": 2048, "v": 4096, "z": 4096, "b": 32, "a": 32}

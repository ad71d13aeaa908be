from dataclasses import replace

import pytest
import torch
from relax_core.model import Qwen35Config
from relax_core.model.cost import sample_cost


def test_the_linear_part_is_the_parameters_that_a_token_meets(config_of):
    """Every matrix weight multiplies each token once, so their number is the cost but for the scan."""
    from relax_bridge import model_map

    config = config_of(mtp_num_hidden_layers=1)
    model = Qwen35Config.from_hf(config)
    shapes = model_map(config).megatron_shapes()
    matrices = sum(
        torch.Size(shape).numel()
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.startswith("embedding")
    )
    matrices += model.hidden_size * model.vocab_size  # the draft layer's use of the head
    scan = 3 * 48 * (3 * 8 + 2 * 64)  # three delta nets of 4 heads x 12 features
    assert sample_cost(model).linear == matrices + scan


def test_only_the_experts_that_a_token_visits_count(moe_config_of):
    few = sample_cost(Qwen35Config.from_hf(moe_config_of(num_experts=6)))
    many = sample_cost(Qwen35Config.from_hf(moe_config_of(num_experts=60)))
    assert many.linear - few.linear == 4 * 32 * 54  # the router's rows
    assert many.quadratic == few.quadratic


def test_attention_alone_is_quadratic(config_of):
    model = Qwen35Config.from_hf(config_of())
    # One full-attention layer: L^2 / 2 pairs, of each two products with 4 x 16 features.
    assert sample_cost(model).quadratic == 64
    none = replace(model, layer_types=("linear_attention",) * 4)
    assert sample_cost(none).quadratic == 0


def test_in_the_published_shape_attention_takes_over_at_long_context():
    model = Qwen35Config(
        vocab_size=248320, hidden_size=2048, ffn_size=512,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 10,
        attention_heads=16, kv_heads=2, head_dim=256, delta_key_heads=16, delta_value_heads=32,
        delta_key_dim=128, delta_value_dim=128, conv_width=4, norm_eps=1e-6, rope_base=1e7, rotary_dim=64,
        tied=False, mtp_layers=0, experts=256, experts_per_token=8, shared_ffn_size=512,
    )  # fmt: skip
    cost = sample_cost(model)
    # 35B-A3B: about 3 billion active parameters, the embedding (0.5 billion) not multiplied.
    assert cost.linear == pytest.approx(3e9, rel=0.15)
    assert cost.linear / cost.quadratic == pytest.approx(70_000, rel=0.2)

"""Weights of a rank, against the model that is built and against the bridge's placement."""

from math import prod

import pytest
import torch
from relax_bridge import Layout, Placement, model_map
from relax_bridge.models.published import PUBLISHED
from relax_core.device.parallel import ParallelConfig
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.plan.local import Local
from relax_core.plan.parameters import Count, stage_parameters
from relax_core.plan.shapes import published
from relax_core.plan.trainer_memory import stages

SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DENSE = {"model_type": "qwen3_5_text", "intermediate_size": 96}
MOE = {
    "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip


@pytest.mark.parametrize("kind", [DENSE, MOE])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mtp", [0, 2])
def test_one_rank_holds_as_many_weights_as_the_model_that_is_built(cpu_world, kind, tied, mtp):
    facts = {**SMALL, **kind, "tie_word_embeddings": tied, "mtp_num_hidden_layers": mtp}
    model = Qwen35Config.from_hf(facts)
    built = list(build_model(model, dtype=torch.bfloat16).parameters())
    local = Local.of(model, ParallelConfig(), tokens=64, activation=2)
    counted = sum(stage_parameters(local, model.layer_types, first=True, last=True).values(), start=Count())
    assert counted.total == sum(p.numel() for p in built)
    assert counted.wide == sum(p.numel() for p in built if p.dtype == torch.float32)


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-35B-A3B"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 4, "sequence": True},
        {"tensor": 2, "sequence": True, "pipeline": 2},
        {"pipeline": 4},
        {"tensor": 4, "sequence": True, "expert": 8, "expert_tensor": 1, "pipeline": 2},
        {"tensor": 8, "sequence": True},
        {"pipeline": 2, "pipeline_chunks": 2},
    ],
    ids=str,
)
def test_a_rank_of_any_layout_holds_what_the_bridge_places_there(name, sizes):
    facts = published()[name]
    model = Qwen35Config.from_hf(facts)
    if not model.experts:
        sizes = {key: value for key, value in sizes.items() if not key.startswith("expert")}
    elif sizes.get("tensor", 1) == 8:
        sizes = {**sizes, "expert": 8, "expert_tensor": 1}
    parallel = ParallelConfig(**sizes)
    names = ("tensor", "pipeline", "pipeline_chunks", "expert", "expert_tensor")
    layout = Layout(**{name: getattr(parallel, name) for name in names})
    placement = Placement(model_map(facts), layout)
    local = Local.of(model, parallel, tokens=64, activation=2)
    per_stage = layout.world_size // parallel.pipeline
    for number, stage in enumerate(stages(local, recompute="none", mtp=MtpConfig())):
        counted = stage_parameters(local, stage.kinds, first=stage.first, last=stage.last)
        placed = sum(prod(shard.shape) for shard in placement.shards(number * per_stage))
        assert sum(count.total for count in counted.values()) == placed


def test_the_shapes_are_those_of_the_bridges_table():
    for name, facts in published().items():
        theirs = PUBLISHED[name]
        assert facts["model_type"] == theirs["model_type"]
        assert facts["tie_word_embeddings"] == theirs["tie_word_embeddings"]
        assert theirs["text_config"].items() <= facts["text_config"].items()
        assert {*facts["text_config"]} - {*theirs["text_config"]} <= {"num_experts_per_tok"}

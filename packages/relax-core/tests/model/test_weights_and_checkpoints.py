"""Parameters fit the weight map, and their checkpoints read on another number of ranks."""

import json
import socket
import sys
from math import prod

import pytest
import torch
from relax_bridge import model_map
from relax_core.device import ParallelConfig
from relax_core.model import Qwen35Config, build_model, named_weights
from relax_core.packing import PackedLayout
from relax_core.plan.shapes import published


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [0, 1, 2])
def test_names_and_shapes_are_those_of_the_weight_map(cpu_world, config_of, tied, depths):
    config = config_of(tie_word_embeddings=tied, mtp_num_hidden_layers=depths)
    model = build_model(Qwen35Config.from_hf(config))
    ours = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert ours == model_map(config).megatron_shapes()


def test_the_published_model_with_256_experts_is_built_as_it_is_mapped(cpu_world):
    facts = published()["Qwen3.5-35B-A3B"]
    sizes = Qwen35Config.from_hf(facts)
    model = build_model(sizes, dtype=torch.bfloat16, device="meta", random_weights=False)
    ours = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    assert ours == model_map(facts).megatron_shapes()
    assert ours["decoder.layers.0.mlp.router.weight"] == (256, 2048)
    # 35 billion, and a draft layer's.
    assert 35e9 < sum(prod(shape) for shape in ours.values()) < 36e9


def test_exported_weights_give_the_same_logits_in_transformers(cpu_world, config_of):
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = config_of(mtp_num_hidden_layers=1)
    model = build_model(Qwen35Config.from_hf(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    exported = dict(model_map(config).export_tensors({n: p.detach() for n, p in model.named_parameters()}))
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    result = theirs.load_state_dict(exported, strict=False)
    assert not result.missing_keys
    assert all(name.startswith("mtp.") for name in result.unexpected_keys)
    tokens_T = torch.randint(0, 96, (20,))
    ours = model.logits(model(tokens_T, PackedLayout.build((20,))))
    torch.testing.assert_close(ours, theirs(tokens_T[None]).logits[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_parameters(cpu_world, config_of, dtype):
    model = build_model(Qwen35Config.from_hf(config_of(mtp_num_hidden_layers=1)), dtype=dtype)
    own = {n for n, p in model.named_parameters() if p.dtype is not dtype}
    in_float32 = {
        n for n, _ in model.named_parameters() if n.endswith(("A_log", "dt_bias", "out_norm.weight"))
    }
    assert own == (set() if dtype is torch.float32 else in_float32)
    assert all(p.dtype is torch.float32 for n, p in model.named_parameters() if n in in_float32)


def test_bfloat16_stays_near_float32(cpu_world, config_of):
    config = Qwen35Config.from_hf(config_of(mtp_num_hidden_layers=1))
    exact, rounded = build_model(config), build_model(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
            b.copy_(a)
            a.copy_(b)
    layout, tokens_T = PackedLayout.build((40, 9)), torch.randint(0, 96, (49,))
    want, got = exact(tokens_T, layout), rounded(tokens_T, layout)
    assert got.dtype is torch.bfloat16
    assert (got.float() - want).abs().mean() < 0.02 * want.abs().mean()


def test_random_weights_are_those_of_hugging_face_in_distribution(cpu_world, config_of):
    model = build_model(Qwen35Config.from_hf(config_of(hidden_size=256, initializer_range=0.05)))
    named = dict(model.named_parameters())
    assert named["decoder.layers.0.mlp.linear_fc1.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert named["embedding.word_embeddings.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert named["decoder.layers.0.self_attention.A_log"].exp().max() <= 16
    assert torch.equal(named["decoder.layers.0.self_attention.dt_bias"], torch.ones(4))
    assert torch.equal(named["decoder.final_layernorm.weight"], torch.zeros(256))
    assert torch.equal(named["decoder.layers.0.self_attention.out_norm.weight"], torch.ones(12))


def test_every_tensor_of_a_checkpoint_has_its_own_key(cpu_world, config_of):
    model = build_model(Qwen35Config.from_hf(config_of(mtp_num_hidden_layers=2)))
    state = model.sharded_state_dict()
    assert {key for key in state if not key.endswith("_extra_state")} == {
        n for n, _ in model.named_parameters()
    }
    shards = [s for value in state.values() for s in (value.build() if hasattr(value, "build") else [value])]
    keys = [shard.key for shard in shards]
    assert len(set(keys)) == len(keys)
    assert sum(shard.data.numel() for shard in shards) == sum(p.numel() for p in model.parameters())
    assert {f"decoder.layers.0.self_attention.in_proj.weight.{part}" for part in "qkvzba"} <= set(keys)
    assert "decoder.layers.3.self_attention.linear_qkv.weight" in keys
    assert "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight.gate" in keys


MEASURE = """
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from relax_core.device import ParallelConfig
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.packing import PackedLayout
from relax_core.plan.shapes import published

def measure(config, directory, parallel):
    joined = MtpConfig(detach_trunk=False, detach_embedding=False)
    model = build_model(Qwen35Config.from_hf(config), parallel, mtp=joined)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), directory))
    layout = PackedLayout.build((9, 1, 14))
    tokens = torch.arange(24) * 7 % 96
    target = torch.where(layout.ahead(1)[1], layout.shift(tokens, 1), -1)
    hidden = model(tokens, layout)
    drafts = model.mtp_hidden(hidden, [layout.shift(tokens, k + 1) for k in range(model.mtp_depths)], layout)
    scored = [model.token_logprobs(h, target, with_entropy=True) for h in (hidden, *drafts)]
    (-sum(s.logprob_T.sum() for s in scored)).backward()
    norm = sum(
        p.grad.square().sum() / (1 if getattr(p, "tensor_model_parallel", False) else parallel.tensor)
        for p in model.parameters()
    )
    dist.all_reduce(norm)
    values = [s.logprob_T.tolist() + s.entropy_T.tolist() for s in scored]
    return {"values": values, "norm": norm.item()}
"""
RANK = (
    "import json, sys\n" + MEASURE + "from relax_core.device import initialise\n"
    "parallel = ParallelConfig(tensor=2)\n"
    "initialise('cpu', parallel)\n"
    "result = measure(json.loads(sys.argv[1]), sys.argv[2], parallel)\n"
    "print(json.dumps(result) if dist.get_rank() == 0 else '')\n"
    "dist.barrier()\n"
)


def measure_on_two_ranks(run_ranks, config: dict, directory) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-W", "ignore", "-c", RANK, json.dumps(config), str(directory)]
    variables = [{**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return json.loads(run_ranks(command, variables)[0])


@pytest.mark.parametrize("kv_heads", [4, 1], ids=["whole groups", "more ranks than groups"])
def test_a_checkpoint_of_one_rank_gives_the_same_numbers_on_two(
    cpu_world, run_ranks, config_of, tmp_path, kv_heads
):
    from megatron.core import dist_checkpointing

    config = config_of(mtp_num_hidden_layers=1, num_key_value_heads=kv_heads)
    model = build_model(Qwen35Config.from_hf(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path))
    scope: dict = {}
    exec(MEASURE, scope)
    one = scope["measure"](config, str(tmp_path), ParallelConfig())
    two = measure_on_two_ranks(run_ranks, config, tmp_path)
    for a, b in zip(one["values"], two["values"], strict=True):
        assert a == pytest.approx(b, abs=2e-5)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-4)


def test_layers_that_the_pipeline_cannot_cut_evenly_are_refused(cpu_world, config_of):
    with pytest.raises(ValueError, match=r"4 layers cannot be cut into pipeline 3 x pipeline_chunks 1 = 3"):
        build_model(Qwen35Config.from_hf(config_of()), ParallelConfig(pipeline=3))


def test_a_rank_with_several_pieces_is_built_by_build_chunks_alone(cpu_world, config_of):
    with pytest.raises(ValueError, match="build_chunks"):
        build_model(Qwen35Config.from_hf(config_of()), ParallelConfig(pipeline=2, pipeline_chunks=2))

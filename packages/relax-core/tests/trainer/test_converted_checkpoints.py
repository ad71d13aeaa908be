"""What `relax-bridge convert` writes, the trainer loads; what the trainer saves, it converts."""

import json
import sys

import pytest
import torch
from megatron.core import dist_checkpointing
from relax_bridge import Checkpoint, Layout, model_map
from relax_bridge.convert import hf_to_megatron, megatron_to_hf
from relax_core.algorithms import AlgorithmConfig
from relax_core.loop.objectives import SftObjective
from relax_core.model import Qwen35Config, build_model, named_weights
from relax_core.trainer.checkpoint import save_checkpoint
from safetensors.torch import save_file

MOE = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}


@pytest.fixture
def hf_directory(tmp_path, config_of):
    """Random weights in a Hugging Face directory of a config with changes."""

    def make(name="hf", **changes):
        config = config_of(**{"mtp_num_hidden_layers": 2, **changes})
        table = model_map(config)
        generator = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in table.hf_shapes().items()}
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return Checkpoint.open(path), table

    return make


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, MOE], ids=["dense", "tied", "experts"]
)
def test_the_model_loads_what_convert_writes(cpu_world, hf_directory, tmp_path, changes):
    source, table = hf_directory(**changes)
    converted = hf_to_megatron(source.path, tmp_path / "megatron")
    model = build_model(Qwen35Config.from_hf(source.config))
    state, missing, unexpected = dist_checkpointing.load(
        model.sharded_state_dict(), str(converted), strict="return_all"
    )
    assert (missing, unexpected) == (set(), set())
    model.load_state_dict(state)
    loaded, wanted = dict(named_weights(model)), dict(table.import_tensors(source))
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in loaded.items())


def test_a_checkpoint_of_the_trainer_converts_to_what_it_exports(make_trainer, samples, config_of, tmp_path):
    trainer = make_trainer(mtp_layers=1)
    trainer.step(samples, SftObjective(AlgorithmConfig(name="sft")))
    saved = save_checkpoint(tmp_path, 1, trainer, {}, keep=1)
    config = config_of(mtp_num_hidden_layers=1)
    table = model_map(config)
    exported = dict(table.export_tensors(dict(named_weights(trainer.model))))
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros_like(x) for name, x in exported.items()}, like / "model.safetensors")
    back = Checkpoint.open(megatron_to_hf(saved, tmp_path / "hf", like=like))
    assert set(back.names) == exported.keys()
    assert all(torch.equal(back.tensor(name), x) for name, x in exported.items())


RANK = """
import json, os, sys, torch
from megatron.core import dist_checkpointing
from relax_bridge import Checkpoint, Layout, import_shards, model_map
from relax_core.device import ParallelConfig, initialise, shutdown
from relax_core.model import Qwen35Config
from relax_core.model.build import build_chunks
from relax_core.trainer.save_strategy import TorchDistWriter

def check(source, converted, out, parallel):
    checkpoint = Checkpoint.open(source)
    table = model_map(checkpoint.config, names=checkpoint.names)
    chunks = build_chunks(Qwen35Config.from_hf(checkpoint.config), parallel)
    state = lambda: {str(i): chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state(), converted)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(i)])
    held = {(i, name): x for i, chunk in enumerate(chunks) for name, x in chunk.named_parameters()}
    layout = Layout(
        parallel.tensor, parallel.pipeline, parallel.pipeline_chunks, parallel.expert, parallel.expert_tensor
    )
    seen = set()
    for shard, tensor in import_shards(table, checkpoint, layout=layout, rank=torch.distributed.get_rank()):
        name = shard.name.rstrip("0123456789")
        expert = shard.name[len(name):]
        mine = held[shard.chunk, name][int(expert)] if expert else held[shard.chunk, name]
        assert torch.equal(mine, tensor), shard.name
        seen.add((shard.chunk, name))
    assert seen == held.keys(), seen ^ held.keys()
    dist_checkpointing.save(state(), out, TorchDistWriter())

for case in json.loads(sys.argv[1]):
    parallel = ParallelConfig(**case["parallel"])
    initialise("cpu", parallel, store=torch.distributed.FileStore(case["store"], 2))
    check(case["source"], case["converted"], case["saved"], parallel)
    # A rank that leaves early breaks connections that the other still makes.
    torch.distributed.barrier()
    shutdown()
"""
CASES = [
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, {"tie_word_embeddings": True}),
    ({"pipeline": 2, "pipeline_chunks": 2}, {"mtp_num_hidden_layers": 0, "tie_word_embeddings": True}),
    ({"pipeline": 2}, {}),
    ({"tensor": 2}, {"num_key_value_heads": 1}),
    ({"expert": 2, "expert_tensor": 1}, MOE),
    ({"tensor": 2, "sequence": True, "expert_tensor": 2}, MOE),
]


def test_two_ranks_load_their_shares_and_what_they_save_converts_back(run_ranks, hf_directory, tmp_path):
    """In each layout, what Megatron loads into the model are the bridge's shards, name by name."""
    cases = []
    for number, (parallel, changes) in enumerate(CASES):
        source, _table = hf_directory(f"hf{number}", **changes)
        converted = hf_to_megatron(source.path, tmp_path / f"megatron{number}")
        saved = tmp_path / f"saved{number}"
        saved.mkdir()
        cases.append(
            {
                "parallel": parallel,
                "source": str(source.path),
                "converted": str(converted),
                "saved": str(saved),
                "store": str(tmp_path / f"store{number}"),
            }
        )
    command = [sys.executable, "-W", "ignore", "-c", RANK, json.dumps(cases)]
    run_ranks(command, [{"WORLD_SIZE": "2", "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)])
    for number, case in enumerate(cases):
        back = megatron_to_hf(case["saved"], tmp_path / f"back{number}", like=case["source"])
        written = (back / "model.safetensors").read_bytes()
        assert written == (tmp_path / f"hf{number}" / "model.safetensors").read_bytes(), case["parallel"]


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_lie_where_megatron_puts_them(pipeline, chunks):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if pipeline == 1 and chunks > 1:
        pytest.skip("one stage has one chunk")
    ends = [(None, None), (2, None), (None, 2), (2, 4)] if pipeline > 2 else [(None, None)]
    for first, last in ends:
        middle = pipeline - (first is not None) - (last is not None)
        layers = (first or 0) + (last or 0) + 4 * middle
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        ours = Layout(
            pipeline=pipeline, pipeline_chunks=chunks, first_stage_layers=first, last_stage_layers=last
        ).layers(layers)
        for stage in range(pipeline):
            for chunk in range(chunks):
                where = {"vp_stage": chunk if chunks > 1 else None, "pp_rank": stage}
                start = get_transformer_layer_offset(config, **where)
                assert ours[stage][chunk] == range(start, start + get_num_layers_to_build(config, **where))

"""One rank: loads a small checkpoint through the bridge, takes two optimizer steps, writes what it got.

Usage: python training_rank.py <device> <precision> <axis> <experts> <folder>, the axis being that over which
the ranks share the model (`tensor`, `context`, `expert`, or `data` for none); under more ranks with
the launcher's variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import json
import os
import sys
from pathlib import Path

import torch

VOCABULARY = 96
LENGTHS = ((9, 4), (1, 0), (17, 16), (5, 0), (12, 3))
"""Tokens of each sample, and how many of its last ones are targets."""


def config(experts: int) -> dict:
    """A model whose sizes the NPU's operators take."""
    sizes = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if experts:
        del sizes["intermediate_size"]
        sizes |= {
            "model_type": "qwen3_5_moe_text",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        }
    return sizes


def write_checkpoint(folder: Path, experts: int) -> None:
    """Writes random float32 weights as Hugging Face has them."""
    from relax_bridge import model_map
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(11)
    shapes = model_map(config(experts)).hf_shapes()
    weights = {name: torch.randn(shapes[name], generator=generator) * 0.1 for name in sorted(shapes)}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(experts)))


def main(device: str, precision: str, axis: str, experts: int, folder: Path) -> None:
    """Trains and saves."""
    if device == "npu":
        from relax_npu.simulation import install

        install(visible=2)
    from relax_core.device import ParallelConfig, initialise, shutdown

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = {} if axis == "data" else {axis: ranks}
    if axis == "expert":
        shared["expert_tensor"] = 1
    parallel = ParallelConfig(**shared, sequence=axis == "tensor")
    world = initialise(device, parallel, seed=7)
    from relax_bridge import (
        Checkpoint,
        Layout,
        ProcessGroupExchange,
        export_buckets,
        import_shards,
        model_map,
    )
    from relax_core.algorithms import AlgorithmConfig
    from relax_core.loop.objectives import SftObjective
    from relax_core.model import MtpConfig, Qwen35Config, build_model, named_weights
    from relax_core.trainer.config import TrainerConfig
    from relax_core.trainer.sample import Sample
    from relax_core.trainer.trainer import Trainer

    checkpoint = Checkpoint.open(folder / f"checkpoint-{experts}")
    sizes, names = config(experts), model_map(config(experts))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    # With Adam's usual eps a weight whose gradient is round-off moves by the whole rate, either way.
    settings = TrainerConfig(lr=1e-2, eps=1e-3, precision=precision, micro_batch_tokens=20)
    model = build_model(
        Qwen35Config.from_hf(sizes), parallel, mtp=MtpConfig(), dtype=dtype, device=world.torch_device
    )
    own = dict(named_weights(model))
    layout = Layout(parallel.tensor, expert=parallel.expert, expert_tensor=1, ranks=ranks)
    for shard, value in import_shards(names, checkpoint, layout=layout, rank=world.rank):
        own[_in_the_whole_model(shard.name, own)].copy_(value)
    trainer = Trainer(
        model, settings, MtpConfig(), device=world.torch_device, optimizer_steps=10, parallel=parallel
    )
    generator = torch.Generator().manual_seed(3)
    samples = []
    for length, targets in LENGTHS:
        mask_L = torch.zeros(length)
        mask_L[length - targets :] = 1
        tokens_L = torch.randint(3, VOCABULARY, (length,), generator=generator)
        samples.append(Sample(tokens_L, mask_L, len(samples)))
    objective = SftObjective(AlgorithmConfig(name="sft"))
    waits = []
    steps = []
    for _ in range(2):
        before = _waits(device)
        step = trainer.step(samples, objective)
        waits.append(_waits(device) - before)
        steps.append(step.values)
    result: dict = {"steps": steps, "waits": waits, "executed": _executed(device)}
    result["scores"] = trainer.score(samples)
    result["weights"] = {}
    buckets = export_buckets(
        names,
        dict(named_weights(model)),
        bucket_bytes=2**16,
        layout=layout,
        rank=world.rank,
        exchange=ProcessGroupExchange() if world.size > 1 else None,
        dtype_of=lambda name: torch.float32,
    )
    for bucket in buckets:
        result["weights"] |= {name: value.cpu() for name, value in bucket.items()}
    torch.save(result, folder / f"{device}-{precision}-{axis}-{experts}-{ranks}-{world.rank}.pt")
    shutdown()


def _in_the_whole_model(name: str, own: dict) -> str:
    """A shard counts the experts of its rank from 0, the model those of all ranks."""
    stem = name.rstrip("0123456789")
    here = sorted(
        (key for key in own if key.rstrip("0123456789") == stem), key=lambda key: int(key[len(stem) :] or 0)
    )
    return here[int(name[len(stem) :] or 0)]


def _waits(device: str) -> int:
    return _executed(device).get("npu.synchronize", 0)


def _executed(device: str) -> dict[str, int]:
    if device != "npu":
        return {}
    from relax_npu.simulation import executed

    return dict(executed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))

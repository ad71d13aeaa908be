"""A checkpoint of the shapes of Qwen3.5-9B with fewer layers and a smaller vocabulary, of random bytes."""

import json
from pathlib import Path

import torch
from relax_bridge import Checkpoint, model_map
from relax_bridge.models.published import PUBLISHED
from relax_bridge.safetensors_writer import SafetensorsFile, Spec

SHARD_BYTES = 10**9


def config(layers: int, vocab: int) -> dict:
    """The public config with `layers` layers (a multiple of 4 keeps the kinds in proportion)."""
    whole = PUBLISHED["Qwen3.5-9B"]
    return {
        **whole,
        "text_config": {**whole["text_config"], "num_hidden_layers": layers, "vocab_size": vocab},
    }


def make(path: Path, layers: int, vocab: int) -> Checkpoint:
    """Writes it in files of about a gigabyte, A_log and dt_bias in float32 as published."""
    path.mkdir(parents=True)
    facts = config(layers, vocab)
    (path / "config.json").write_text(json.dumps(facts))
    files: list[dict[str, Spec]] = [{}]
    for name, shape in model_map(facts).hf_shapes().items():
        wide = name.endswith(("A_log", "dt_bias"))
        size = torch.Size(shape).numel() * (4 if wide else 2)
        if sum(spec.size for spec in files[-1].values()) + size > SHARD_BYTES:
            files.append({})
        files[-1][name] = Spec(shape, "F32" if wide else "BF16", size)
    generator = torch.Generator().manual_seed(0)
    where = {}
    for number, plan in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        out = SafetensorsFile(path / file, plan, {"format": "pt"})
        for name, spec in plan.items():
            dtype = torch.float32 if spec.dtype == "F32" else torch.bfloat16
            noise = torch.randint(-(2**31), 2**31, (spec.size // 4 + 1,), generator=generator)
            values = noise.to(torch.int32).view(torch.uint8)[: spec.size]
            out.put(name, values.view(dtype).reshape(spec.shape))
            where[name] = file
        out.close()
    index = {"metadata": {"total_size": sum(s.size for p in files for s in p.values())}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return Checkpoint.open(path)

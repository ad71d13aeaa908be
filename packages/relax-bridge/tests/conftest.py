"""Small Qwen3.5 configs and random checkpoints, made without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_bridge import Checkpoint, model_map
from safetensors.torch import save_file


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A text-only config: layers delta net, attention, delta net, attention; one MTP layer."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    return config | overrides


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """bfloat16 noise, float32 for A_log and dt_bias, as released checkpoints have it."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=gen)
        out[name] = noise if name.endswith(("A_log", "dt_bias")) else noise.bfloat16()
    return out


def write_plain(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A single-file checkpoint by safetensors' own writer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    """An opened random checkpoint of `tiny_config()`."""
    config = tiny_config()
    tensors = random_tensors(model_map(config).hf_shapes())
    return Checkpoint.open(write_plain(tmp_path / "tiny", config, tensors))

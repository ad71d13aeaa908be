"""Small configs and random checkpoints, made without transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_bridge import Checkpoint, model_map
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
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
MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "num_experts": 3,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 noise; float32 for A_log and dt_bias, as released checkpoints have it."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=gen)
        out[name] = noise if name.endswith(("A_log", "dt_bias")) else noise.bfloat16()
    return out


def write_plain(path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """A checkpoint of one file, by safetensors' own writer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(path)


@pytest.fixture
def tiny_config() -> Callable[..., dict[str, Any]]:
    """A text-only dense config (delta net, attention, delta net, attention; one MTP layer) with changes."""
    return lambda **changes: TINY | changes


@pytest.fixture
def moe_config() -> Callable[..., dict[str, Any]]:
    """The same with experts."""
    return lambda **changes: TINY | MOE | changes


@pytest.fixture(scope="session")
def noise() -> Callable[..., dict[str, Tensor]]:
    """`random_tensors`."""
    return random_tensors


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Writes and opens a checkpoint of a config: make(config, name="x", edit=function of the tensors)."""

    def build(
        config: dict[str, Any], *, name: str = "source", edit: Any = None, names: Any = None
    ) -> Checkpoint:
        tensors = random_tensors(model_map(config, names=names).hf_shapes())
        if edit is not None:
            edit(tensors)
        return write_plain(tmp_path / name, config, tensors)

    return build


@pytest.fixture
def tiny(make: Callable[..., Checkpoint]) -> Checkpoint:
    """An opened random checkpoint of the dense config."""
    return make(TINY)

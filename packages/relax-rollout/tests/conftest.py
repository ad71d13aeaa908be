"""Small random models for this package's tests, built on the spot."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

torch.set_num_threads(1)


def build_qwen35(
    *, vocab: int = 40, layers: int = 4, hidden: int = 32, tied: bool = True, seed: int = 0, **more
):
    """A random Qwen3.5 with non-trivial norms, A_log and dt_bias."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **more,
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.copy_(torch.rand_like(parameter) * 2 - 1)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval()


def save_qwen35(directory: Path, **more) -> Path:
    build_qwen35(**more).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A hybrid model (3 delta-net layers, 1 attention layer) with a tied head."""
    return save_qwen35(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory) -> Path:
    """The same architecture with other weights."""
    return save_qwen35(tmp_path_factory.mktemp("other"), seed=1)

"""A small checkpoint with its tokenizer, and runs of it that take seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_core.config.root import RelaxConfig
from relax_core.data.arithmetic import write_arithmetic
from relax_core.data.arithmetic_tokenizer import arithmetic_vocabulary, write_arithmetic_tokenizer


@pytest.fixture(scope="session")
def small_model(tmp_path_factory, small_config) -> Path:
    """A Hugging Face directory of random weights with one draft layer."""
    bare = tmp_path_factory.mktemp("bare")
    write_arithmetic_tokenizer(bare)
    config = {
        **small_config,
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": -(-len(arithmetic_vocabulary()) // 16) * 16,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }
    (bare / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3)
        for name, shape in model_map(config).hf_shapes().items()
    }
    return write_checkpoint(
        tmp_path_factory.mktemp("small") / "model", tensors, like=Checkpoint.open(bare, weights=False)
    )


@pytest.fixture
def length_reward(tmp_path, monkeypatch) -> str:
    """A reward of the user's own: the more characters the better."""
    (tmp_path / "length_reward.py").write_text("def score(item):\n    return len(item.completion) / 10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "length_reward:score"


@pytest.fixture
def small_run(tmp_path, small_model, length_reward) -> Callable[..., RelaxConfig]:
    """The config of four steps of 4 prompts x 4 completions; sections given change single settings."""
    train, held_out = write_arithmetic(tmp_path / "task", 0, train_rows=40, held_out_rows=6)
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 4, "device": "cpu", "progress": "none", "threads": 1, "seed": 3, "name": "small"},
        "model": {"path": str(small_model)},
        "data": {"path": str(train), "eval_path": str(held_out)},
        "trainer": {"lr": 1e-2, "precision": "fp32"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 3},
        "reward": {"function": length_reward, "concurrency": 1},
        "checkpoint": {"every": 2},
    }

    def make(**sections: dict[str, Any]) -> RelaxConfig:
        names = {*base, *sections}
        return RelaxConfig.model_validate({n: {**base.get(n, {}), **sections.get(n, {})} for n in names})

    return make

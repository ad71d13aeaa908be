"""Small Qwen3.5 models and the trainer process that they need."""

import copy
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from relax_core.device import initialise, shutdown


@pytest.fixture(scope="session")
def small_config() -> dict:
    """A `config.json` of four layers whose sizes all differ; copy it before changing it."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "eos_token_id": None,
        "pad_token_id": None,
    }


@pytest.fixture
def config_of(small_config):
    """A copy of `small_config` with some settings changed."""
    return lambda **changes: {**copy.deepcopy(small_config), **changes}


@pytest.fixture
def moe_config_of(config_of):
    """The same with experts in place of the feed-forward: 6 of them, 2 for each token, and the shared one."""

    def make(**changes) -> dict:
        config = config_of(
            model_type="qwen3_5_moe_text",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        )
        del config["intermediate_size"]
        return config | changes

    return make


@pytest.fixture
def cpu_world() -> Iterator[None]:
    """A trainer process of one rank on the cpu device."""
    shutdown()
    yield initialise("cpu", seed=7)
    shutdown()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def file_size_limit():
    """A context in which no file of this process can grow beyond so many bytes, as on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit

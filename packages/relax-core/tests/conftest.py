"""Small Qwen3.5 models, the trainer process that they need, and runs of them that take seconds."""

import copy
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_core.config.root import RelaxConfig
from relax_core.data.arithmetic import write_arithmetic
from relax_core.data.arithmetic_tokenizer import arithmetic_vocabulary, write_arithmetic_tokenizer
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


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[str]]:
    """Runs processes that wait for one another; (what each printed). One that fails ends all at once."""

    def run(command: list[str], variables: list[dict[str, str]], *, timeout_s: float = 600) -> list[str]:
        """`command` once for each entry of `variables`, which is added to its environment."""
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for own in variables
        ]
        with ThreadPoolExecutor(len(started)) as pool:
            outputs = [pool.submit(process.communicate) for process in started]
            try:
                done, rest = wait(outputs, timeout=timeout_s, return_when=FIRST_COMPLETED)
                while rest and all(started[outputs.index(one)].returncode == 0 for one in done):
                    more, rest = wait(rest, timeout=timeout_s, return_when=FIRST_COMPLETED)
                    assert more, f"{len(rest)} ranks did not end in {timeout_s:g} s"
                    done |= more
                # Its partners may say more of what went wrong.
                wait(rest, timeout=3)
            finally:
                for process in started:
                    process.kill()
        failed = [
            f"rank {rank} ended with {process.returncode}:\n{output.result()[1]}"
            for rank, (process, output) in enumerate(zip(started, outputs, strict=True))
            if process.returncode != 0
        ]
        assert not failed, "\n".join(failed)
        return [output.result()[0] for output in outputs]

    return run


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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
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


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """The folder of the made task: rows.jsonl, its pictures, and the model beside them."""
    from relax_core.testing.colours import write_model, write_rows

    folder = tmp_path_factory.mktemp("colours")
    write_rows(folder)
    write_model(folder / "model")
    return folder


@pytest.fixture
def colours_run(colours):
    """The config of reinforcement learning on the task; sections given change single settings."""
    base = {
        "run": {"steps": 2, "device": "cpu", "progress": "none", "threads": 1, "seed": 0, "name": "colours"},
        "model": {"path": str(colours / "model"), "vision": "trained"},
        "data": {"path": str(colours / "rows.jsonl"), "images_key": "images"},
        "trainer": {"lr": 1e-2, "precision": "fp32"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 16, "max_new_tokens": 1},
        "reward": {"function": "exact_match", "concurrency": 1},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }

    def make(**sections):
        names = {*base, *sections}
        return RelaxConfig.model_validate({n: {**base.get(n, {}), **sections.get(n, {})} for n in names})

    return make

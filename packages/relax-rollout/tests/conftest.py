"""Small random models, built on the spot, and what transformers' own full forward says of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_rollout import Completion, Request
from transformers import PreTrainedModel, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

VOCABULARY = 40


def build_qwen35(*, tied: bool = True, seed: int = 0, **more: object) -> Qwen3_5ForCausalLM:
    """A random Qwen3.5 (3 delta-net layers, 1 attention layer) with non-trivial norms, A_log and dt_bias."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(fields | more)))
    randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, spread: float = 0.5) -> None:
    """Weights far from the initialisation's special values, yet tame: logits of a few units.

    Products of a vector with a matrix have `spread` times the vector's size.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("A_log"):
            parameter.copy_(torch.rand_like(parameter) * 2 - 1)
        elif parameter.ndim == 1:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(spread * noise / parameter[0].numel() ** 0.5)


def reference_logprobs(model: PreTrainedModel, ids: Sequence[int], start: int, temperature: float = 1.0):
    """Log-probs [len(ids) - start, V] of the tokens from ``start`` on: one forward without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return (logits / temperature).log_softmax(-1)[start - 1 : -1]


def worst_gap(
    model: PreTrainedModel, requests: Sequence[Request], completions: Sequence[Completion]
) -> float:
    """Largest difference between the completions' log-probs and the reference's."""
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        ids = (*request.prompt_ids, *completion.token_ids)
        temperature = request.sampling.temperature or 1.0
        table = reference_logprobs(model, ids, len(request.prompt_ids), temperature)
        wanted = table.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, (wanted - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


class Models:
    """Saved models by what was asked of them, each built once a session; ``load`` gives transformers' own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved: dict[str, Path] = {}
        self._loaded: dict[str, PreTrainedModel] = {}

    def get(self, **asked: object) -> Path:
        key = repr(sorted(asked.items()))
        if key not in self._saved:
            path = self._root / f"model-{len(self._saved)}"
            self._loaded[key] = build_qwen35(**asked)
            self._loaded[key].save_pretrained(path)
            self._saved[key] = path
        return self._saved[key]

    def load(self, **asked: object) -> PreTrainedModel:
        self.get(**asked)
        return self._loaded[repr(sorted(asked.items()))]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


DEVICE = os.environ.get("RELAX_TEST_DEVICE", "cpu")
"""Where SGLang's servers of the tests run."""


class SglangServers:
    """Servers that stay for the session, by what they serve; the one used longest ago makes room."""

    MOST = 2

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, tuple[str, Any]] = {}

    def url(self, model: Path, **options: Any) -> str:
        from relax_rollout.engines.sglang import launch, view
        from relax_rollout.engines.sglang.config import SglangConfig
        from relax_rollout.engines.sglang.process import Process, free_port

        key = f"{model} {sorted(options.items())}"
        if key in self._running and self._running[key][1].code is None:
            self._running[key] = self._running.pop(key)
            return self._running[key][0]
        while len(self._running) >= self.MOST:
            self._running.pop(next(iter(self._running)))[1].end()
        # The accelerators' kernels are made for bfloat16.
        dtype = "float32" if DEVICE == "cpu" else "bfloat16"
        config = SglangConfig(model, **({"max_rows": 256, "dtype": dtype, "device": DEVICE} | options))
        folder = Path(tempfile.mkdtemp(dir=self._root))
        port = free_port()
        served = view.write_view(model, folder)
        environment = launch.environment(config) | options.pop("environment", {})
        log = self._root / f"server-{port}.log"
        process = Process(launch.command(config, served, port), environment, log)
        self._running[key] = (f"http://127.0.0.1:{port}", process)
        return self._running[key][0]

    def close(self) -> None:
        for _, process in self._running.values():
            process.end()


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory) -> Iterator[SglangServers]:
    servers = SglangServers(tmp_path_factory.mktemp("sglang"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def gap() -> Callable[..., float]:
    return worst_gap


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    return reference_logprobs


@pytest.fixture(scope="session")
def randomise_weights() -> Callable[..., None]:
    return randomise


@pytest.fixture(scope="session")
def build_model() -> Callable[..., Qwen3_5ForCausalLM]:
    return build_qwen35

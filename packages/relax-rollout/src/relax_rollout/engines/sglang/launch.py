"""The command and environment of one server."""

import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from relax_rollout.engines.sglang import accelerators, plugin, route, serve
from relax_rollout.engines.sglang.config import SglangConfig
from relax_rollout.engines.sglang.parent import PARENT
from relax_rollout.engines.sglang.process import python
from relax_rollout.engines.sglang.view import MARGIN, is_text_only

CPU_PATH = Path(__file__).parent / "cpu" / "path"
CPU_TOKENS = 65536
STATES_PER_ROW = 4
"""SGLang keeps recurrent states of finished prompts too, and reckons with three for each running row."""


def require_sglang() -> None:
    """Say what to install.

    Raises:
        ValueError: SGLang is not installed here.
    """
    if find_spec("sglang") is None:
        raise ValueError(
            "the engine sglang starts servers of SGLang 0.5.15, which is not installed in this environment; "
            "install it (packages/relax-rollout/requirements has the list for CPUs), give urls of servers "
            "that run elsewhere, or use the engine transformers"
        )


def require_router() -> None:
    """Say what to install.

    Raises:
        ValueError: sglang-router is not installed here.
    """
    if find_spec("sglang_router") is None:
        raise ValueError(
            "sglang-router 0.3.2 is to be started and is not installed in this environment; install it, "
            "give the URL of a router that runs, or leave router out: the engine shares requests out itself"
        )


def require_processor(model: Path) -> None:
    """Say what a checkpoint with a vision tower lacks: without it a server neither comes up nor says why.

    Args:
        model: the checkpoint.

    Raises:
        ValueError: no file says how its pictures are prepared.
    """
    if "vision_config" not in json.loads((model / "config.json").read_text()):
        return
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((model / name).is_file() for name in names):
        raise ValueError(
            f"{str(model)!r} has a vision tower and neither {' nor '.join(names)}, which SGLang reads before "
            "it serves; copy the file from the published checkpoint, or use the engine transformers"
        )


def command(config: SglangConfig, served: Path, port: int) -> list[str]:
    """Arguments of a server.

    Args:
        config: of the engine.
        served: the folder that SGLang reads, see :mod:`relax_rollout.engines.sglang.view`.
        port: to listen on.
    """
    device = config.device.partition(":")[0]
    given: dict[str, object] = {
        "--model-path": served,
        "--host": "127.0.0.1" if config.host == "127.0.0.1" else "0.0.0.0",
        "--port": port,
        "--device": device,
        "--dtype": config.dtype,
        "--mamba-ssm-dtype": "float32",
        "--tp-size": config.tensor_parallel,
        "--max-running-requests": config.max_rows,
        "--mamba-radix-cache-strategy": "no_buffer",
        "--context-length": config.context and config.context + MARGIN,
        "--max-total-tokens": config.max_tokens or (CPU_TOKENS if device == "cpu" else None),
        "--log-level": "warning",
    }
    flags = ["--disable-overlap-schedule", "--skip-server-warmup", "--skip-tokenizer-init"]
    if device == "cpu":
        given |= {
            "--attention-backend": "torch_native",
            # Sizes are given, not measured: other processes come and go in the memory of a host.
            "--mem-fraction-static": 0.9,
            "--max-mamba-cache-size": STATES_PER_ROW * config.max_rows,
        }
        # An idle scheduler would keep a core busy.
        flags.append("--sleep-on-idle")
    else:
        flags.append("--enable-memory-saver")
    if config.draft_tokens:
        given |= {
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": config.draft_tokens,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": config.draft_tokens + 1,
        }
    pairs = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
    return python("-m", serve.__name__, *pairs, *flags, *accelerators.arguments(config), *config.arguments)


def router_command(config: SglangConfig, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """Arguments of sglang-router in front of servers.

    It only shares requests out: one that is lost is drawn again by the engine, which knows whether it was
    aborted meanwhile.
    """
    local = config.host == "127.0.0.1"
    given: dict[str, object] = {
        "--host": "127.0.0.1" if local else "0.0.0.0",
        "--port": port,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": metrics_port,
        "--policy": config.router_policy,
        "--worker-startup-timeout-secs": math.ceil(config.start_timeout_s),
        "--worker-startup-check-interval": 1,
        "--request-timeout-secs": 10**7,
        "--max-concurrent-requests": -1,
        "--health-check-interval-secs": 5,
        "--log-level": "warn",
    }
    pairs = [str(part) for name, value in given.items() for part in (name, value)]
    flags = ["--disable-retries", "--disable-circuit-breaker", "--worker-urls", *urls]
    return python("-m", route.__name__, *pairs, *flags)


def environment(config: SglangConfig) -> dict[str, str]:
    """Environment variables of a server."""
    stated = json.loads((Path(config.model) / "config.json").read_text())
    text = stated if is_text_only(stated) else stated.get("text_config", {})
    dtype = config.dtype if config.dtype != "auto" else str(text.get("dtype") or text.get("torch_dtype"))
    found = {
        PARENT: str(os.getpid()),
        **accelerators.environment(config),
        # By default a bfloat16 copy of the last inputs, also in a float32 model.
        "SGLANG_MAMBA_CONV_DTYPE": dtype,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_text_only(stated):
        found[plugin.TEXT_ONLY] = "1"
    if config.device == "cpu":
        path = os.pathsep.join(filter(None, [str(CPU_PATH), os.environ.get("PYTHONPATH")]))
        found |= {
            plugin.CPU_ENGINE: "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": path,
            # Threads of several servers on few cores only wait for one another; compiling takes minutes.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "TORCHDYNAMO_DISABLE": "1",
        }
        if config.tensor_parallel > 1:
            # It would give each rank a NUMA node of its own.
            cores = sorted(os.sched_getaffinity(0))
            shared = [str(cores[rank % len(cores)]) for rank in range(config.tensor_parallel)]
            found["SGLANG_CPU_OMP_THREADS_BIND"] = os.environ.get(
                "SGLANG_CPU_OMP_THREADS_BIND", "|".join(shared)
            )
    return found

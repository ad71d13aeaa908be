"""One optimizer step of the trainer on one device: tokens per second, peak memory, and where the time goes.

    python benchmarks/trainer/step.py                       # 1.88 B: all recompute kinds, drafts 0 and 1
    python benchmarks/trainer/step.py --shape 4.21b --recompute full --mtp 0
    python benchmarks/trainer/step.py --device cpu --shape tiny --seq 256 --steps 2

The shapes, the sequence of 8192 random tokens and AdamW are those of the Hugging Face + fla baseline that the
README names. Weights are random bfloat16, every token but the first is a target. One JSON line a case: the
median over bursts of steps, two bursts before them not counted; within a burst nothing waits for the device
but what the trainer itself reads, as in a run; `waits`, how often the host waits for the device within a step
(0); `loss` so that a broken step shows; the parts are milliseconds of device time by kind of kernel, from
torch's profiler in a step of its own (`--table` prints its rows).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from itertools import product
from typing import Any

import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.device import initialise, shutdown
from relax_core.device.launch import World
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer

COMMON = {
    "model_type": "qwen3_5_text", "full_attention_interval": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1.88b": {
        "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
    "4.21b": {
        "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
    "tiny": {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 512,
    },
}  # fmt: skip
# What a user would run instead (one H200): shape and recompute -> tokens/s, GiB.
BASELINES = {("1.88b", "none"): (23179, 66.2), ("4.21b", "full"): (9215, 51.6)}
# Kernels by what their names contain, first match counts.
PARTS = (
    ("optimizer", ("adam", "multi_tensor", "foreach", "norm_kernel_cuda", "lpnorm")),
    ("delta rule", ("delta", "wy_", "solve", "recompute_w_u", "scan", "gates")),
    ("convolution", ("conv",)),
    ("attention", ("flash", "fmha", "attn", "attention", "sdp")),
    ("head", ("logprob", "log_prob", "entropy", "lse")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "xmma", "cublas", "matmul", "mm_", "gemv")),
    ("norms", ("rms", "norm")),
    ("swiglu, rotary, gates", ("swiglu", "rotary", "gate", "silu", "sigmoid")),
    ("copies and sums", ("copy", "memcpy", "memset", "elementwise", "add", "fill", "cat", "reduce", "index")),
)


def make_trainer(world: World, options: argparse.Namespace, recompute: Any, drafts: int) -> Trainer:
    """A trainer of random weights."""
    config = Qwen35Config.from_hf(
        {
            **COMMON,
            **SHAPES[options.shape],
            "mtp_num_hidden_layers": drafts,
            **({} if not options.layers else {"num_hidden_layers": options.layers}),
        }
    )
    settings = TrainerConfig(
        lr=1e-5,
        micro_batch_tokens=options.seq,
        recompute=recompute,
        precision="bf16",
        **trainer_settings(options),
    )
    model = build_model(
        config, dtype=torch.bfloat16, recompute=recompute, mtp=MtpConfig(), device=world.torch_device
    )
    return Trainer(model, settings, MtpConfig(), device=world.torch_device, optimizer_steps=1000)


def trainer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those of the command line; for the large shape, number formats like the baseline's if it gives none."""
    if options.trainer is not None:
        return dict(json.loads(options.trainer))
    half = {"gradient_precision": "bf16", "moment_precision": "bf16"}
    return half if options.shape == "4.21b" else {}


def make_sample(options: argparse.Namespace, vocabulary: int) -> Sample:
    """One sample of `seq` random tokens, all of them targets but the first."""
    generator = torch.Generator().manual_seed(1)
    mask_L = torch.ones(options.seq)
    mask_L[0] = 0
    return Sample(torch.randint(0, vocabulary, (options.seq,), generator=generator), mask_L)


def measure(world: World, options: argparse.Namespace, recompute: str, drafts: int) -> dict[str, Any]:
    """The figures of one case."""
    trainer = make_trainer(world, options, recompute, drafts)
    sample = make_sample(options, trainer.model.model_config.vocab_size)
    objective = SftObjective(AlgorithmConfig(name="sft"))
    seconds, loss = [], 0.0
    for step in range(2 + options.steps):
        if step == 2:
            world.device.reset_peak_memory()
        world.device.synchronize()
        started = time.perf_counter()
        before = None
        for _ in range(options.burst):
            metrics = trainer.step([sample], objective)
            # As a run does it: a step's numbers are read once the next one is queued.
            if before is not None:
                loss = before.values["loss"]
            before = metrics
        loss = metrics.values["loss"]
        world.device.synchronize()
        seconds.append((time.perf_counter() - started) / options.burst)
    median = statistics.median(seconds[2:])
    rate, memory = options.seq / median, world.device.memory().peak / 2**30
    line: dict[str, Any] = {
        "case": "trainer step", "shape": options.shape, "recompute": recompute, "mtp": drafts,
        "seq": options.seq, "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "step_ms": round(median * 1e3, 1), "slowest_ms": round(max(seconds[2:]) * 1e3, 1),
        "trainer": trainer_settings(options), "tokens_per_s": round(rate), "peak_gib": round(memory, 1),
        "loss": round(loss, 4),
    }  # fmt: skip
    base = BASELINES.get((options.shape, recompute))
    if base and drafts == 0 and options.seq == 8192:
        line |= {"speedup": round(rate / base[0], 2), "memory_of_baseline": round(memory / base[1], 2)}
    if world.torch_device.type == "cuda" and not options.no_profile:
        line["waits"] = waits(trainer, sample, objective)
        line["parts_ms"] = profile(trainer, sample, objective, table=options.table)
    return line


def waits(trainer: Trainer, sample: Sample, objective: Any) -> int:
    """How often the host waits for the device within a step, as torch sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        trainer.step([sample], objective)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in given)


def profile(trainer: Trainer, sample: Sample, objective: Any, *, table: bool) -> dict[str, float]:
    """Device milliseconds of one step by kind of kernel; `idle` is what no kernel ran in."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.step([sample], objective)
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    rows = [
        row
        for row in profiler.key_averages()
        if row.self_device_time_total > 0 and row.device_type.name == "CUDA"
    ]
    parts: dict[str, float] = {}
    for row in rows:
        name = row.key.lower()
        part = next((part for part, words in PARTS if any(word in name for word in words)), "other")
        parts[part] = parts.get(part, 0.0) + row.self_device_time_total / 1e3
    if table:
        rows.sort(key=lambda row: -row.self_device_time_total)
        for row in rows[:60]:
            print(
                f"{row.self_device_time_total / 1e3:9.2f} ms {row.count:6d} x  {row.key[:90]}",
                file=sys.stderr,
            )
    busy = sum(parts.values())
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return {name: round(value, 1) for name, value in {**ordered, "busy": busy, "wall": wall * 1e3}.items()}


def main() -> None:
    """Prints one JSON line per case."""
    parser = argparse.ArgumentParser(description="One optimizer step of the trainer on one device.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.88b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--burst", type=int, default=4, help="steps between two waits for the device")
    parser.add_argument("--layers", type=int, default=0, help="of the trunk; 0 takes the shape's")
    parser.add_argument("--recompute", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--mtp", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--trainer", help="further settings of the trainer, as JSON")
    parser.add_argument("--table", action="store_true", help="the profiler's rows, on standard error")
    parser.add_argument("--no-profile", action="store_true")
    options = parser.parse_args()
    world = initialise(options.device, seed=1)
    for recompute, drafts in product(options.recompute, options.mtp):
        try:
            line = measure(world, options, recompute, drafts)
        except torch.OutOfMemoryError as error:
            line = {
                "case": "trainer step",
                "shape": options.shape,
                "recompute": recompute,
                "mtp": drafts,
                "error": str(error).splitlines()[0],
            }
        print(json.dumps(line), flush=True)
        gc.collect()
        world.device.empty_cache()
    shutdown()


if __name__ == "__main__":
    main()

"""What the host does for one optimizer step: operators that it queues, and the time it takes for that.

    python benchmarks/trainer/host.py                    # 24 layers, as the 1.88 B shape has, of tiny sizes
    python benchmarks/trainer/host.py --recompute full --mtp 1 --rows

A device that computes faster than the host queues stands still, whatever its kernels take. With widths of a
few numbers nearly all of a step on the CPU is the host's own work, which is the same on every device: Python
and torch's dispatcher (forward and optimizer), autograd (backward). One JSON line: `ops` are operators of
torch that reach the dispatcher's last stage, `cpu_ms` the time of the process, the median and the least over
`--steps` steps; the operators of relax-kernels are the torch reference's many here, where a device has one
kernel for each. `--rows` prints the operators by the line of Relax or Megatron that asked for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from relax_core.algorithms import AlgorithmConfig
from relax_core.device import initialise, shutdown
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "model_type": "qwen3_5_text", "full_attention_interval": 4, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 512,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


class Ops(TorchDispatchMode):
    """Counts operators, and where they were asked for."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self.count = 0
        self.rows: Counter[str] = Counter()
        self._where = rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self._where:
            frames = [
                f for f in traceback.extract_stack() if "relax_" in f.filename or "megatron" in f.filename
            ]
            last = frames[-1]
            self.rows[f"{function} at {last.filename.split('/src/')[-1]}:{last.lineno} {last.line}"] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description="The host's work for one optimizer step.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mtp", type=int, default=0)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--rows", action="store_true", help="operators by line, on standard error")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = initialise("cpu", seed=1)
    facts = {**SIZES, "num_hidden_layers": options.layers, "mtp_num_hidden_layers": options.mtp}
    model = build_model(
        Qwen35Config.from_hf(facts),
        dtype=torch.bfloat16 if options.precision == "bf16" else torch.float32,
        recompute=options.recompute,
        mtp=MtpConfig(),
        device=world.torch_device,
    )
    settings = TrainerConfig(
        lr=1e-5, micro_batch_tokens=options.seq, recompute=options.recompute, precision=options.precision
    )
    trainer = Trainer(model, settings, MtpConfig(), device=world.torch_device, optimizer_steps=1000)
    mask_L = torch.ones(options.seq)
    mask_L[0] = 0
    sample = Sample(torch.arange(options.seq) * 7 % 512, mask_L)
    objective = SftObjective(AlgorithmConfig(name="sft"))
    taken = []
    for _ in range(2 + options.steps):
        started = time.process_time()
        metrics = trainer.step([sample], objective)
        taken.append(1e3 * (time.process_time() - started))
    with Ops(rows=options.rows) as ops:
        trainer.step([sample], objective)
    line = {
        "case": "host work of a step", "layers": options.layers, "mtp": options.mtp,
        "recompute": options.recompute, "precision": options.precision, "ops": ops.count,
        "cpu_ms": round(statistics.median(taken[2:]), 1), "least_cpu_ms": round(min(taken[2:]), 1),
        "loss": round(metrics.values["loss"], 5),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    for row, count in ops.rows.most_common(60):
        print(f"{count:6d} x  {row}", file=sys.stderr)
    shutdown()


if __name__ == "__main__":
    main()

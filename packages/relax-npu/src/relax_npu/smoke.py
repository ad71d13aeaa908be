"""`python -m relax_npu.smoke`: one optimizer step of a model with a 9B's layer shapes on this machine's NPUs.

Four layers instead of 32, random weights, real sizes of everything else: what a run would meet in its first
step. Loss and gradient norm must be finite, and an operator that `ascend` has must not be left to torch.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

SHAPES: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": None,
    "pad_token_id": None,
}
_LENGTHS = (2048, 777, 1, 1270)


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the step, on several dies through torchrun; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m relax_npu.smoke", description=__doc__)
    parser.add_argument("--dies", type=_dies, default=1, help="dies to spread the model over (default: 1)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.dies > 1 and not chosen.rank:
        each = ("--nproc-per-node", str(chosen.dies), "-m", "relax_npu.smoke")
        command = [sys.executable, "-m", "torch.distributed.run", *each]
        return subprocess.run([*command, "--dies", str(chosen.dies), "--rank"], check=False).returncode
    # Set before relax_kernels reads it; what the user chose goes before.
    os.environ.setdefault("RELAX_KERNELS_STRICT", "1")
    values = step(tensor_parallel(chosen.dies))
    sys.stdout.write(f"{values}\n")
    return 0 if all(math.isfinite(values[name]) for name in ("loss", "grad_norm")) else 1


def tensor_parallel(dies: int, heads: int = SHAPES["num_key_value_heads"]) -> int:
    """Ranks that share a weight: as many as divide dies and key/value heads; the rest are replicas."""
    return math.gcd(dies, heads)


def step(tensor: int, shapes: dict[str, Any] | None = None) -> dict[str, float]:
    """One step, `tensor` ranks sharing each weight; returns its metrics. The trainer is looked up by name."""
    import torch

    device_of, model_of = import_module("relax_core.device"), import_module("relax_core.model")
    trainer_of, loop = (
        import_module("relax_core.trainer.trainer"),
        import_module("relax_core.loop.objectives"),
    )
    sample_of, settings = (
        import_module("relax_core.trainer.sample"),
        import_module("relax_core.trainer.config"),
    )
    algorithms = import_module("relax_core.algorithms")
    parallel = device_of.ParallelConfig(tensor=tensor, sequence=tensor > 1)
    world = device_of.initialise("npu", parallel)
    sizes = model_of.Qwen35Config.from_hf(shapes or SHAPES)
    mtp = model_of.MtpConfig()
    model = model_of.build_model(
        sizes, parallel, mtp=mtp, dtype=torch.bfloat16, device=world.torch_device, recompute="full"
    )
    config = settings.TrainerConfig(recompute="full", micro_batch_tokens=2048)
    trainer = trainer_of.Trainer(
        model, config, mtp, device=world.torch_device, optimizer_steps=1, parallel=parallel
    )
    samples = []
    for number, length in enumerate(_LENGTHS):
        mask_L = torch.ones(length)
        mask_L[0] = 0
        samples.append(sample_of.Sample(torch.randint(0, 1000, (length,)), mask_L, number))
    objective = loop.SftObjective(algorithms.AlgorithmConfig(name="sft"))
    values: dict[str, float] = trainer.step(samples, objective).values
    device_of.shutdown()
    return values


def _dies(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is no number of dies")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())

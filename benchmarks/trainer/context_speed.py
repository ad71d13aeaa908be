"""Layers of the 1.88 B shape on two ranks that share a row, against one rank that holds it: JSON lines.

    torchrun --nproc-per-node 2 benchmarks/trainer/context_speed.py
    torchrun --nproc-per-node 2 benchmarks/trainer/context_speed.py --device cpu --tiny --tokens 512

A step is forward, backward and the sum of the gradients over the ranks (which a single rank does not have to
do; `reduce_ms` is its part, not overlapped). Hidden states and gradients are first compared with those of one
rank: relative to their norm, the hidden states and the whole gradient may be off by the bound, one tensor of
it by five times as much. A way that is further off prints no time and makes the exit status 1. Times are the
median of the steps, of the slower rank. `speedup` is one rank's time over that of the ranks together. A way
that fails on all ranks alike (memory) has its error in its line; if one rank fails alone, its partner waits
`--timeout-s` and the run ends, with the lines before it printed.

`layouts.py` measures whole optimizer steps, of other layouts as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from relax_core.device import ParallelConfig, initialise, shutdown
from relax_core.device.launch import World, seed_all
from relax_core.model import Qwen35Config, Qwen35Model, build_model
from relax_core.packing import PackedLayout

# What a single tensor of the gradient may be further off than the whole: its rounding errors need not cancel.
TENSOR = 5
# (full attention, delta net)
WAYS = (("gather", "heads"), ("heads", "heads"), ("gather", "state"), ("heads", "state"))
SHAPE = {
    "model_type": "qwen3_5_text", "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 6144,
    "full_attention_interval": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "mtp_num_hidden_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


class Bench:
    """A model on this rank's part of one row.

    Axes: T row positions, D hidden.
    """

    def __init__(self, world: World, options: argparse.Namespace, way: tuple[str, str] | None) -> None:
        self.world = world
        attention, delta = way or ("auto", "auto")
        parallel = ParallelConfig(context=world.size, context_attention=attention, context_delta=delta)
        changes = {"num_hidden_layers": options.layers, **(TINY if options.tiny else {})}
        self.config = Qwen35Config.from_hf({**SHAPE, **changes})
        dtype = torch.bfloat16 if world.torch_device.type == "cuda" else torch.float32
        # The same weights on every rank and for every way.
        seed_all(world.device, 0)
        self.model: Qwen35Model = build_model(
            self.config,
            parallel,
            dtype=dtype,
            recompute=options.recompute,
            device=world.torch_device,
        )
        tokens, samples = options.tokens, options.samples
        lengths = [tokens // samples] * (samples - 1)
        size = 1 if way is None else world.size
        self.layout = PackedLayout.build(
            [*lengths, tokens - sum(lengths)],
            pad_to_multiple=2 * world.size,
            context_size=size,
            context_rank=world.rank % size,
        )
        generator = torch.Generator().manual_seed(1)
        total = self.layout.padded_total
        tokens_T = torch.randint(0, self.config.vocab_size, (total,), generator=generator)
        upstream_TD = torch.randn(total, self.config.hidden_size, generator=generator)
        self.tokens_T = self.layout.local(tokens_T).to(world.torch_device)
        self.upstream_TD = self.layout.local(upstream_TD).to(world.torch_device, dtype)

    def step(self) -> torch.Tensor:
        """This rank's hidden states; gradients of its tokens."""
        self.model.zero_grad(set_to_none=True)
        hidden_TD = self.model(self.tokens_T, self.layout)
        hidden_TD.backward(self.upstream_TD)
        return hidden_TD.detach()

    def reduce(self) -> None:
        """Sums the gradients over the ranks that share the row."""
        if self.layout.context_size > 1:
            for parameter in self.model.parameters():
                # The head is not part of this.
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.float().cpu() for name, p in self.model.named_parameters() if p.grad is not None}

    def milliseconds(self, work: Callable[[], object], steps: int) -> float:
        """The median over the steps, of the slower rank."""
        times = []
        for _ in range(steps):
            self.world.device.synchronize()
            dist.barrier()
            start = time.perf_counter()
            work()
            self.world.device.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        median = torch.tensor(statistics.median(times), device=self.world.torch_device)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return float(median)

    def time(self, steps: int) -> dict[str, float]:
        def whole() -> None:
            self.step()
            self.reduce()

        self.world.device.reset_peak_memory()
        whole_ms = self.milliseconds(whole, steps)
        reduce_ms = self.milliseconds(self.reduce, steps)
        peak = self.world.device.memory().peak / 2**30
        return {"ms": round(whole_ms, 2), "reduce_ms": round(reduce_ms, 2), "peak_gib": round(peak, 2)}


def distances(bench: Bench, hidden_TD: torch.Tensor, one: dict) -> dict[str, float]:
    """How far hidden states, the whole gradient and its furthest tensor are from one rank's; relative."""
    wanted_TD = bench.layout.local(one["hidden_TD"])
    off, size = {}, {}
    for name, gradient in bench.gradients().items():
        off[name] = float((gradient - one["gradients"][name]).square().sum())
        size[name] = float(one["gradients"][name].square().sum())
    total = sum(size.values())
    return {
        "hidden": float((hidden_TD - wanted_TD).norm() / wanted_TD.norm()),
        "gradient": math.sqrt(sum(off.values()) / total),
        # A tensor whose gradient is next to nothing is measured against a thousandth of the whole.
        "tensor": max(math.sqrt(off[name] / max(size[name], total * 1e-6)) for name in off),
    }


def measure(way: tuple[str, str] | None, options: argparse.Namespace, world: World, one: dict) -> dict:
    """One way of sharing the row among all ranks, or (None) every rank with a row of its own."""
    bench = Bench(world, options, way)
    line: dict = {"tokens": options.tokens, "samples": options.samples, "layers": options.layers}
    line["ranks"] = bench.layout.context_size
    hidden_TD = bench.step().float().cpu()
    bench.reduce()
    if way is None:
        one |= {"hidden_TD": hidden_TD, "gradients": bench.gradients()}
    else:
        line |= {"attention": way[0], "delta": way[1]}
        off = distances(bench, hidden_TD, one)
        # Hidden states are of this rank's tokens, so each rank has a difference of its own.
        largest = torch.tensor([off["hidden"], off["gradient"], off["tensor"]], device=world.torch_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        hidden, gradient, tensor = (float(f"{x:.2g}") for x in largest.tolist())
        line |= {"hidden": hidden, "gradient": gradient, "tensor": tensor, "bound": options.bound}
        if not (max(hidden, gradient) <= options.bound and tensor <= TENSOR * options.bound):
            return {**line, "parity": "failed"}
    for _ in range(options.warmup):
        bench.step()
    line |= bench.time(options.steps)
    if options.profile:
        profile(bench, world)
    if way is None:
        one["ms"] = line["ms"]
    else:
        line["speedup"] = round(one["ms"] / line["ms"], 3)
    return line


def profile(bench: Bench, world: World) -> None:
    """Where one step's device time goes, on the standard error of rank 0."""
    with torch.profiler.profile() as recorded:
        bench.step()
        world.device.synchronize()
    if world.rank == 0:
        kind = "cuda" if world.torch_device.type == "cuda" else "cpu"
        table = recorded.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=30)
        print(table, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--samples", type=int, default=1, help="of equal length in the row")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--bound", type=float, default=None, help="of the relative difference from one rank")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the script out")
    parser.add_argument("--timeout-s", type=float, default=90, help="of every collective")
    options = parser.parse_args()
    if options.bound is None:
        # bfloat16 keeps 8 bits: two layouts round alike only on average.
        options.bound = 5e-2 if options.device == "cuda" else 1e-4
    one: dict = {}
    failed = False
    ranks = ParallelConfig(context=int(os.environ.get("WORLD_SIZE", "1")))
    world = initialise(options.device, ranks, seed=0, timeout=timedelta(seconds=options.timeout_s))
    for way in (None, *WAYS):
        try:
            line = measure(way, options, world, one)
        except (RuntimeError, ValueError) as error:
            names = dict(zip(("attention", "delta"), way or (), strict=False))
            line = {"tokens": options.tokens, **names, "error": f"{type(error).__name__}: {error}"[:1500]}
        failed |= not line.keys() >= {"ms"}
        if world.rank == 0:
            print(json.dumps(line), flush=True)
        if way is None and "ms" not in line:
            break
        gc.collect()
        world.device.empty_cache()
    shutdown()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

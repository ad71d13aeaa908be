"""`relax-train --plan` against reality: peak memory and time of optimizer steps, planned and measured.

    python benchmarks/plan/measure.py                       # as many ranks as there are GPUs, one or two
    python benchmarks/plan/measure.py --only 2b-none 4b-full-mtp
    python benchmarks/plan/measure.py --device cpu --tiny   # tries the script out; the figures mean nothing

Starts its own ranks. Weights are random bfloat16, every token but a sample's first is a target. One JSON line
a case, in GiB and milliseconds: `peak` is the largest number of bytes in torch's allocator during a step on
the fullest rank (goal: the plan within 10 %), `step_ms` the median step (goal: within 25 %); `parts` splits
both where they can be split: `static` (weights, gradients, optimizer), `forward` (allocated when the trunk's
log-probs are done), `reserved`. A case that fails prints its error, and the others go on; cases that would
begin after `--budget` seconds are left out and say so. The last line sums up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from relax_core.device import ParallelConfig
from relax_core.model import MtpConfig, Qwen35Config
from relax_core.model.lora_config import LoraConfig
from relax_core.plan.devices import DEVICES, GIB
from relax_core.plan.shapes import published
from relax_core.plan.trainer import TrainerPlan, plan_trainer
from relax_core.plan.workload import PICTURE_TOKENS
from relax_core.testing import RankError, RankPool, Row
from relax_core.trainer.config import TrainerConfig

GOALS = {"memory": 0.10, "time": 0.25}
_SP = {"tensor": 2, "sequence": True}
_HALF = {"gradient_precision": "bf16", "moment_precision": "bf16"}
_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_key_head_dim": 16,
    "linear_num_value_heads": 4, "linear_value_head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
}  # fmt: skip

_TINY_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16,
    "out_hidden_size": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: unique.
        shape: a published model.
        lengths: tokens of the samples of one step.
        budget: tokens of a micro-batch.
        parallel, trainer: settings that differ from their defaults.
        mtp: draft layers.
        layers: of the trunk, if not the model's.
        pictures: what is done with the vision tower; every sample then has a picture.
        lora: settings of adapters.
    """

    name: str
    shape: str
    lengths: tuple[int, ...]
    budget: int
    parallel: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    mtp: int = 0
    layers: int | None = None
    pictures: Literal["none", "frozen", "trained"] = "none"
    lora: dict[str, Any] = field(default_factory=dict)

    def facts(self, *, tiny: bool) -> dict[str, Any]:
        """The model's config."""
        whole = published()[self.shape]
        text = whole["text_config"]
        changes: dict[str, Any] = {"mtp_num_hidden_layers": self.mtp}
        if self.layers:
            changes["num_hidden_layers"] = self.layers
        if tiny:
            changes |= {name: size for name, size in _TINY.items() if name in text}
            changes["rope_parameters"] = {"mrope_section": [1, 1, 0]}
            whole = {**whole, "vision_config": {**whole["vision_config"], **_TINY_TOWER}}
        return {**whole, "text_config": {**text, **changes}}


CASES: dict[int, tuple[Case, ...]] = {
    1: (
        Case("2b-none", "Qwen3.5-2B", (8192,), 8192),
        Case("0.8b-none-mtp", "Qwen3.5-0.8B", (2048,) * 16, 16384, mtp=1),
        Case("4b-full-mtp", "Qwen3.5-4B", (8192, 8192), 16384, trainer={"recompute": "full", **_HALF}, mtp=1),
        Case("2b-selective-mtp", "Qwen3.5-2B", (4096,) * 4, 16384, trainer={"recompute": "selective"}, mtp=1),
        Case("9b-full", "Qwen3.5-9B", (8192,), 8192, trainer={"recompute": "full", **_HALF}),
        Case("4b-none", "Qwen3.5-4B", (8192,), 8192, trainer=_HALF),
        Case("0.8b-short", "Qwen3.5-0.8B", (512,) * 2, 1024),
        Case("35b-a3b-4-layers", "Qwen3.5-35B-A3B", (4096,) * 2, 8192, trainer=_HALF, layers=4),
        Case("2b-pictures-trained", "Qwen3.5-2B", (1024,) * 8, 8192, pictures="trained"),
        Case("2b-pictures-frozen", "Qwen3.5-2B", (1024,) * 8, 8192, mtp=1, pictures="frozen"),
        Case("4b-lora", "Qwen3.5-4B", (8192,), 8192, lora={"rank": 16}),
    ),
    2: (
        Case("2b-tp2", "Qwen3.5-2B", (4096,) * 4, 16384, parallel=_SP, mtp=1),
        Case("2b-dp2", "Qwen3.5-2B", (8192,) * 4, 8192, mtp=1),
        Case("2b-cp2", "Qwen3.5-2B", (16384,), 16384, parallel={"context": 2}, mtp=1),
        Case("2b-pp2", "Qwen3.5-2B", (8192,) * 4, 8192, parallel={"pipeline": 2}, mtp=1),
        Case(
            "4b-tp2-full", "Qwen3.5-4B", (16384,), 16384, parallel=_SP, trainer={"recompute": "full"}, mtp=1
        ),
        Case(
            "9b-tp2-selective", "Qwen3.5-9B", (8192,), 8192, parallel=_SP,
            trainer={"recompute": "selective", **_HALF},
        ),
        Case(
            "35b-a3b-8-layers-ep2", "Qwen3.5-35B-A3B", (8192,) * 2, 8192, parallel={"expert": 2},
            trainer=_HALF, layers=8,
        ),
        Case("0.8b-dp2-none", "Qwen3.5-0.8B", (4096,) * 8, 16384),
    ),
}  # fmt: skip


def planned(case: Case, ranks: int, device: str, lengths: list[int], *, tiny: bool) -> TrainerPlan:
    """The plan of a case."""
    return plan_trainer(
        Qwen35Config.from_hf(case.facts(tiny=tiny), vision=case.pictures != "none"),
        ParallelConfig(**case.parallel),
        TrainerConfig(**{**case.trainer, "micro_batch_tokens": case.budget}),
        MtpConfig(),
        DEVICES[device],
        ranks=ranks,
        lengths=lengths,
        scored=1 - len(lengths) / sum(lengths),
        vision="absent" if case.pictures == "none" else case.pictures,
        picture_tokens=min(PICTURE_TOKENS, min(lengths) // 2) if case.pictures != "none" else 0,
        lora=LoraConfig(**case.lora) if case.lora else None,
    )


def gib(size: float) -> float:
    """Bytes as GiB."""
    return round(size / GIB, 2)


def ms(seconds: float) -> float:
    """Seconds as milliseconds."""
    return round(1e3 * seconds, 1)


def compare(case: Case, plan: TrainerPlan, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of a case."""
    stages = [plan.memory[number * len(plan.memory) // len(measured)] for number in range(len(measured))]
    full = max(range(len(measured)), key=lambda number: measured[number]["peak"])
    memory, peak = stages[full], measured[full]["peak"]
    time, step = plan.time, max(rank["median_seconds"] for rank in measured)
    return {
        "case": case.name,
        "ranks": len(measured),
        "peak": {"plan": gib(memory.peak), "measured": gib(peak), "ratio": round(memory.peak / peak, 3)},
        "step_ms": {"plan": ms(time.total), "measured": ms(step), "ratio": round(time.total / step, 3)},
        "within": abs(memory.peak / peak - 1) <= GOALS["memory"],
        "within_time": abs(time.total / step - 1) <= GOALS["time"],
        "parts": {
            "static": [
                [gib(s.static), gib(rank["static"])] for s, rank in zip(stages, measured, strict=True)
            ],
            "forward": [
                [gib(s.static + sum(s.activations.values()) + s.communication), gib(rank["forward"])]
                for s, rank in zip(stages, measured, strict=True)
            ],
            "peaks": [[gib(s.peak), gib(rank["peak"])] for s, rank in zip(stages, measured, strict=True)],
            "reserved": [gib(rank["reserved"]) for rank in measured],
            "plan_gib": {name: gib(size) for name, size in memory.parts.items()},
            "plan_activations": {name: gib(size) for name, size in memory.activations.items()},
            "plan_at": memory.at,
            "plan_ms": {
                "forward": {kind: ms(value) for kind, value in time.forward.kinds.items()},
                "forward_host": ms(time.forward.host),
                "backward": {kind: ms(value) for kind, value in time.backward.kinds.items()},
                "backward_host": ms(time.backward.host),
                "micro_batches": time.micro_batches,
                "bubble": ms(time.bubble),
                "reduce": ms(time.reduce),
                "optimizer": ms(time.optimizer),
            },
            "steps_ms": [ms(value) for value in measured[full]["seconds"]],
            "first_ms": ms(measured[full]["first_seconds"]),
        },
        "tokens_per_s": round(sum(case.lengths) / step),
        "loss": round(measured[full]["loss"], 3),
    }


def main() -> int:
    """Prints a line a case, and the sum; 1 if a case failed or missed a goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--spec", default="h200", choices=sorted(DEVICES), help="row of the plan's table")
    parser.add_argument("--ranks", type=int, default=0, help="1 or 2; 0 takes the GPUs there are")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=100, help="seconds after which no case begins")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the script out")
    options = parser.parse_args()
    ranks = options.ranks or (min(2, torch.cuda.device_count()) if options.device == "cuda" else 1)
    started = time.perf_counter()
    pool = RankPool(ranks, device=options.device, timeout_s=110)
    lines: list[dict[str, Any]] = []
    failed = 0
    try:
        for case in CASES[ranks]:
            if options.only and case.name not in options.only:
                continue
            if time.perf_counter() - started > options.budget:
                print(json.dumps({"case": case.name, "left_out": "no time left"}), flush=True)
                continue
            trainer = {**case.trainer, "micro_batch_tokens": case.budget}
            if options.device == "cpu":
                trainer = {"micro_batch_tokens": case.budget}
            precision = "fp32" if options.device == "cpu" else "bf16"
            row = Row(
                case.name,
                ranks,
                case.parallel,
                trainer=trainer,
                precision=precision,
                pictures=case.pictures,
                lora=case.lora,
            )
            try:
                lengths = [min(n, 64) for n in case.lengths] if options.tiny else list(case.lengths)
                plan = planned(case, ranks, options.spec, lengths, tiny=options.tiny)
                facts = case.facts(tiny=options.tiny)
                job = {"facts": facts, "lengths": lengths, "warmup": 2, "steps": options.steps}
                measured = pool.run(row, "measure", **job)
                lines.append(compare(case, plan, measured))
            except (RankError, ValueError, ZeroDivisionError) as error:
                failed += 1
                print(json.dumps({"case": case.name, "error": str(error)[-1500:]}), flush=True)
                continue
            print(json.dumps(lines[-1]), flush=True)
    finally:
        pool.close()
    summary = {
        "cases": len(lines), "failed": failed, "memory_within": sum(line["within"] for line in lines),
        "time_within": sum(line["within_time"] for line in lines),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    print(json.dumps(summary), flush=True)
    return int(failed or any(not (line["within"] and line["within_time"]) for line in lines))


if __name__ == "__main__":
    sys.exit(main())

"""Time on the host before a step of 4096 samples: plan, layouts and packed tokens of one rank; JSON lines.

    OMP_NUM_THREADS=1 python benchmarks/trainer/schedule.py [--samples 4096] [--rounds 7]

What the plan promises (each sample once, the budget, equal numbers on every rank) and what the layouts hold
(every token of every sample, back to back) is checked first, against the samples themselves; a case that
fails prints no time and makes the exit status 1. Times are processor time, the smallest of the rounds.
`rank_spread`
and `turn_spread` are the largest cost over the mean one, minus 1: of the ranks' totals, and of micro-batches
that meet in one turn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from relax_core.packing import PackedLayout, SampleCost, plan_micro_batches

BUDGET = 16384
RANKS = 8
COST = SampleCost(linear=1.0, quadratic=1e-4)
Draw = Callable[[random.Random], int]
CASES: dict[str, Draw] = {
    "lengths like chain-of-thought": lambda r: min(BUDGET, 1 + int(r.lognormvariate(7, 1))),
    "uniform up to the budget": lambda r: r.randint(1, BUDGET),
    "short answers": lambda r: r.randint(1, 300),
    "long ones and short ones": lambda r: r.choice((13000, r.randint(300, 4800))),
    "two fill a micro-batch": lambda r: r.randint(7800, 8400),
}


def layouts(
    plan: Sequence[list[int]], samples: Sequence[torch.Tensor]
) -> Iterator[tuple[PackedLayout, torch.Tensor]]:
    """What a rank makes of its micro-batches: layout, packed tokens, places of the next tokens."""
    for members in plan:
        layout = PackedLayout.build([len(samples[i]) for i in members])
        layout.ahead(1)
        yield layout, layout.pack([samples[i] for i in members], dtype=torch.int64)


def faults(plans: list[list[list[int]]], samples: Sequence[torch.Tensor]) -> list[str]:
    """What the plan or the layouts of any rank do wrong."""
    bins = [members for plan in plans for members in plan]
    wrong = []
    if sorted(i for members in bins for i in members) != list(range(len(samples))):
        wrong.append("a sample is missing or twice")
    if any(len(m) > 1 and sum(len(samples[i]) for i in m) > BUDGET for m in bins):
        wrong.append("a micro-batch exceeds the budget")
    if len({len(plan) for plan in plans}) != 1:
        wrong.append("ranks differ in their number of micro-batches")
    for plan in plans:
        for members, (layout, tokens_T) in zip(plan, layouts(plan, samples), strict=True):
            for i, own in zip(members, layout.unpack(tokens_T), strict=True):
                if not torch.equal(own, samples[i]):
                    wrong.append(f"sample {i} is packed wrongly")
    return wrong


def spread(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) - 1


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return round(1e3 * best, 1)


def measure(name: str, draw: Draw, count: int, rounds: int) -> bool:
    generator = random.Random(0)
    lengths = [draw(generator) for _ in range(count)]
    samples = [torch.full((length,), i) for i, length in enumerate(lengths)]

    def plan() -> list[list[list[int]]]:
        return plan_micro_batches(lengths, BUDGET, ranks=RANKS, cost=COST)

    plans = plan()
    line: dict[str, object] = {"case": name, "samples": count, "tokens": sum(lengths), "ranks": RANKS}
    if wrong := faults(plans, samples):
        print(json.dumps({**line, "parity": f"failed: {'; '.join(wrong[:3])}"}), flush=True)
        return False
    work = [[sum(COST(lengths[i]) for i in members) for members in rank] for rank in plans]
    plan_ms = milliseconds(plan, rounds)
    layout_ms = milliseconds(lambda: list(layouts(plans[0], samples)), rounds)
    line |= {
        "micro_batches": len(plans[0]),
        "plan_ms": plan_ms,
        "layout_ms": layout_ms,
        "ms": round(plan_ms + layout_ms, 1),
        "rank_spread": round(spread([sum(rank) for rank in work]), 4),
        "turn_spread": round(max(spread(turn) for turn in zip(*work, strict=True)), 4),
    }
    print(json.dumps(line), flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    passed = [measure(*case, options.samples, options.rounds) for case in CASES.items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

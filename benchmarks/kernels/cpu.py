"""Speed of the operators on the CPU beside what transformers runs there: one JSON line a case.

    OMP_NUM_THREADS=1 python benchmarks/kernels/cpu.py [--only SUBSTRING] [--rounds 7]

Values and gradients of the two sides are compared first; a case whose parity fails prints no time and makes
the exit status 1. Then both sides run in turn, forward and backward, in the same process; the smallest
processor time of each is kept, because other programs on the machine change the clock but not the work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch
from cpu_cases import Case, cases

Run = Callable[..., Sequence[torch.Tensor]]


def grads(case: Case, run: Run, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results and the gradients of their weighted sum."""
    outputs = run(*case.inputs)
    wanted = [x for x in case.inputs if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


def difference(case: Case, weights: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a result or gradient, as a fraction of its largest value."""
    worst = 0.0
    for mine, theirs in zip(grads(case, case.ours, weights), grads(case, case.peer, weights), strict=True):
        scale = max(theirs.abs().max().item(), 1e-3)
        gap = (mine - theirs).abs().max().item() / scale
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the processor time and the wall time of one run."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(case: Case, rounds: int) -> bool:
    with torch.no_grad():
        weights = [torch.randn_like(x) for x in case.peer(*case.inputs)]
    gap = difference(case, weights)
    line: dict[str, object] = {"case": case.name, "peer": case.peer_name, "difference": float(f"{gap:.2g}")}
    if gap > case.allowed:
        print(json.dumps({**line, "parity": f"failed: more than {case.allowed}"}), flush=True)
        return False
    best: dict[str, list[tuple[float, float]]] = {"ours": [], "ours_forward": [], "peer": []}
    for _ in range(rounds):
        best["ours"].append(seconds(lambda: grads(case, case.ours, weights)))
        best["peer"].append(seconds(lambda: grads(case, case.peer, weights)))
        with torch.no_grad():
            best["ours_forward"].append(seconds(lambda: case.ours(*case.inputs)))
    cpu = {name: min(times)[0] * 1e3 for name, times in best.items()}
    wall = {name: min(t[1] for t in times) * 1e3 for name, times in best.items()}
    line |= {f"{name}_ms": round(value, 3) for name, value in cpu.items()}
    line |= {f"{name}_wall_ms": round(wall[name], 3) for name in ("ours", "peer")}
    line |= {"times_faster": round(cpu["peer"] / cpu["ours"], 2), "threads": torch.get_num_threads()}
    print(json.dumps(line), flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = [measure(make(), arguments.rounds) for name, make in cases().items() if arguments.only in name]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does the quickstart keep its promises with every seed? One JSON line a seed, and one with the verdict.

    python benchmarks/first_run/seeds.py [--seeds 0 1 2 3 4] [FLAGS OF relax-train ...]

Each seed is one `relax-train` of its own, timed from outside. The exit status is 1 if a seed fails a goal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GOALS = {"gain": 0.25, "wall_s": 120.0, "startup_s": 25.0, "peak_rss_gib": 4.0}
"""The least gain in held-out accuracy, and the most of everything else."""


def run(seed: int, folder: Path, flags: Sequence[str]) -> dict[str, object]:
    """One run; its outcome in one line."""
    script = "import sys; from relax_core.cli.train import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "--run.dir", str(folder), "--run.name", f"seed{seed}"]
    command += ["--run.seed", str(seed), "--run.progress", "none", *flags]
    begun = time.perf_counter()
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wall_s = time.perf_counter() - begun
    if ended.returncode != 0:
        return {"seed": seed, "failed": ended.stdout[-2000:], "misses": ["the run"]}
    place = folder / f"seed{seed}"
    summary = json.loads((place / "summary.json").read_text())
    steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    first = next(step["time"] for step in steps if step["step"] == 1)
    line = {
        "seed": seed,
        "eval_before": summary["eval_before"],
        "eval_after": summary["eval_after"],
        "gain": round(summary["eval_after"] - summary["eval_before"], 4),
        "wall_s": round(wall_s, 2),
        "startup_s": round(first["elapsed"] - first["total"], 2),
        "peak_rss_gib": summary["peak_rss_gib"],
    }
    phases = [name for step in steps for name in step["time"]["phases"]]
    spent = {name: sum(s["time"]["phases"].get(name, 0.0) for s in steps) for name in dict.fromkeys(phases)}
    return {**line, "phases_s": {n: round(s, 2) for n, s in spent.items()}, "misses": misses(line)}


def misses(line: dict[str, float]) -> list[str]:
    """The goals that a seed fails."""
    return [
        name
        for name, goal in GOALS.items()
        # Told apart so that a value that is not a number fails either way.
        if not (line[name] >= goal if name == "gain" else line[name] <= goal)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments, flags = parser.parse_known_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            lines.append(run(seed, Path(folder), flags))
            print(json.dumps(lines[-1]), flush=True)
    failed = [line["seed"] for line in lines if line["misses"]]
    verdict = {"goals": GOALS, "seeds": len(lines), "failed_seeds": failed, "ok": not failed}
    print(json.dumps(verdict), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

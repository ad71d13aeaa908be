"""What Ray adds to the quickstart on one machine: seconds until the first step, and time per step.

Runs the quickstart in one process and with `cluster.mode ray`, in turn, and prints one JSON line per case and
one with the ratios. Parity first: both must end with the same weights, bit for bit. Seconds of the clock
depend on what else the machine does; `start_cpu_s` and `step_cpu_s` are processor seconds of all processes of
a run.

    python benchmarks/ray/overhead.py --steps 10 --rounds 2
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORK = ("rollout", "reward", "logprob", "train", "update")


def run(mode, steps, folder, flags):
    """Seconds before the first step, of each phase of the steps after it, processor seconds, and a digest."""
    command = [
        sys.executable, "-m", "relax_core.cli.train", "--run.dir", str(folder), "--run.name", mode,
        "--run.steps", str(steps), "--run.progress", "none", "--eval.every", "0", "--eval.before", "false",
        "--eval.after", "false", "--checkpoint.every", "0", "--cluster.mode", mode, *flags,
    ]  # fmt: skip
    start_cpu, cpu = processor_seconds(command, folder / mode / "metrics.jsonl")
    lines = [json.loads(line)["time"] for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    start = lines[0]["elapsed"] - lines[0]["total"]
    # The first step of a process compiles, allocates and starts what it needs.
    phases = [{name: line["phases"].get(name, 0.0) for name in WORK} for line in lines[1:]]
    weights = b"".join(file.read_bytes() for file in sorted((folder / mode / "hf").glob("*.safetensors")))
    return start, phases, (start_cpu, (cpu - start_cpu) / (steps - 1)), hashlib.sha256(weights).hexdigest()


def processor_seconds(command, metrics):
    """Runs a command; processor seconds of its processes until the first step is written, and in all."""
    run = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    used, until_first = {}, None
    while run.poll() is None:
        for process in [run, *run.children(recursive=True)]:
            try:
                times = process.cpu_times()
                used[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        if until_first is None and metrics.exists() and "\n" in metrics.read_text():
            until_first = sum(used.values())
        time.sleep(0.2)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return until_first, sum(used.values())


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options, flags = parser.parse_known_args()
    starts = {"inline": [], "ray": []}
    seconds = {"inline": [], "ray": []}
    digests = set()
    for number in range(options.rounds):
        for mode in ("inline", "ray") if number % 2 == 0 else ("ray", "inline"):
            with tempfile.TemporaryDirectory() as folder:
                start, phases, cpu, digest = run(mode, options.steps, Path(folder), flags)
            steps = [sum(step.values()) for step in phases]
            starts[mode].append(start)
            seconds[mode] += steps
            digests.add(digest)
            case = {
                "mode": mode,
                "load": round(os.getloadavg()[0], 1),
                "start_s": round(start, 2),
                "start_cpu_s": round(cpu[0], 2),
                "step_cpu_s": round(cpu[1], 3),
                "step_s": round(statistics.median(steps), 4),
                "phases_s": {
                    name: round(statistics.median(step[name] for step in phases), 4) for name in WORK
                },
            }
            print(json.dumps(case), flush=True)
    if len(digests) != 1:
        raise SystemExit("the runs ended with different weights: no figure is worth anything")
    step = {mode: statistics.median(values) for mode, values in seconds.items()}
    summary = {
        "bit_equal": True,
        "start_added_s": round(min(starts["ray"]) - min(starts["inline"]), 2),
        "step_ratio": round(step["ray"] / step["inline"], 4),
        "step_ratio_of_minima": round(min(seconds["ray"]) / min(seconds["inline"]), 4),
        "goals": {"start_added_s": 15, "step_ratio": 1.05},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

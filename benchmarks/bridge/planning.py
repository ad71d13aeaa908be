"""Microseconds of planning per tensor: the table, its tensors, and one rank's share of them.

uv run python benchmarks/bridge/planning.py
"""

import json
import time

import torch
from relax_bridge import Layout, Placement, model_map
from relax_bridge.export_plan import steps, targets
from relax_bridge.models.published import PUBLISHED

LAYOUTS = {
    "Qwen3.5-9B": (Layout(), Layout(tensor=8, pipeline=4)),
    "Qwen3.5-35B-A3B": (Layout(), Layout(tensor=2, pipeline=2, expert=8, expert_tensor=1)),
    "Qwen3.5-397B-A17B": (Layout(), Layout(tensor=8, pipeline=4, expert=8, expert_tensor=1)),
}


def main() -> None:
    """Prints one JSON line per model and layout."""
    model_map(PUBLISHED["Qwen3.5-0.8B"])  # finds the installed tables, once a process
    for size, layouts in LAYOUTS.items():
        for layout in layouts:
            times = []
            for _ in range(5):
                began = time.process_time()
                table = model_map(PUBLISHED[size])
                placement = Placement(table, layout)
                owned = placement.shards(0)
                planned = time.process_time()
                wanted = targets(table, lambda name: torch.bfloat16)
                plan = list(steps(placement, wanted, bucket_bytes=2**28, travels=lambda rank: True))
                times.append((planned - began, time.process_time() - planned))
            count, moves = len(table.entries), sum(len(step.moves) for step in plan)
            print(
                json.dumps(
                    {
                        "model": size,
                        "ranks": layout.world_size,
                        "tensors": count,
                        "owned": len(owned),
                        "import_us_per_tensor": round(min(t[0] for t in times) / count * 1e6, 2),
                        "export_us_per_move": round(min(t[1] for t in times) / moves * 1e6, 2),
                        "export_us_per_tensor": round(min(t[1] for t in times) / count * 1e6, 2),
                    }
                )
            )


if __name__ == "__main__":
    main()

"""A rank of a `RankPool`: runs rows from its standard input until that ends."""

import gc
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore


def main() -> None:
    """Reads one JSON line per job, as `RankPool.run` writes it; answers with one line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What libraries print must not reach the pipe that carries the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        job = json.loads(line)
        try:
            _run(job)
            answer: dict[str, Any] = {"error": None}
        except Exception:
            answer = {"error": traceback.format_exc()}
        # Groups live as long as what refers to them, in cycles too, and each keeps threads.
        gc.collect()
        answers.write(json.dumps(answer) + "\n")


def _run(job: dict[str, Any]) -> None:
    from relax_core.device import ParallelConfig, initialise, shutdown
    from relax_core.testing.jobs import JOBS
    from relax_core.testing.row import Row

    row = Row(**job["row"])
    store = TCPStore("127.0.0.1", job["port"], is_master=False, timeout=timedelta(seconds=60))
    world = initialise(
        job["device"],
        ParallelConfig(**row.parallel),
        seed=7,
        timeout=timedelta(seconds=job["timeout_s"]),
        store=PrefixStore(f"job {job['number']}", store),
    )
    try:
        result = JOBS[job["kind"]](row, world, **job["options"])
        if world.rank == 0:
            torch.save(result, Path(job["out"]))
        # A rank that leaves early breaks connections that others still make.
        torch.distributed.barrier()
    finally:
        shutdown()


if __name__ == "__main__":
    main()

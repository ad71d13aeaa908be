"""Import and export beside copying the same bytes: same medium, same run, parity first.

    uv run python benchmarks/bridge/speed.py --folder /some/disk

Prints one JSON line a case; `ratio` is the least over rounds of time / time of the copy beside it.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from relax_bridge import (
    Checkpoint,
    Layout,
    Placement,
    export_buckets,
    import_shards,
    model_map,
    write_checkpoint,
)
from slice import make


def read_plain(files: list[Path], share: float) -> float:
    """Seconds to read the first `share` of each file into memory that is there."""
    sizes = [int(file.stat().st_size * share) for file in files]
    room = [torch.zeros(size, dtype=torch.uint8).numpy() for size in sizes]
    began = time.perf_counter()
    for file, memory in zip(files, room, strict=True):
        with file.open("rb", buffering=0) as handle:
            view, done = memoryview(memory), 0
            while done < len(view):
                done += handle.readinto(view[done:])
    return time.perf_counter() - began


def write_plain(folder: Path, sizes: list[int], memory: torch.Tensor) -> float:
    """Seconds to write and flush files of these sizes."""
    target = Path(tempfile.mkdtemp(dir=folder))
    began = time.perf_counter()
    for number, size in enumerate(sizes):
        with (target / str(number)).open("wb", buffering=0) as handle:
            view, done = memoryview(memory.numpy())[:size], 0
            while done < size:
                done += handle.write(view[done : done + 2**26])
            os.fsync(handle.fileno())
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return took


def imported(source: Checkpoint, layout: Layout, rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds to fill parameters that are there, and them."""
    table = model_map(source.config, names=source.names)
    held = {
        s.name: torch.zeros(s.shape, dtype=source.dtype(s.entry.hf[0]))
        for s in Placement(table, layout).shards(rank)
    }
    began = time.perf_counter()
    for _ in import_shards(table, source, layout=layout, rank=rank, into=lambda shard: held[shard.name]):
        pass
    return time.perf_counter() - began, held


def check(source: Checkpoint) -> None:
    """What two ranks import is what the full tensors are cut into; an export returns the files."""
    table, layout = model_map(source.config, names=source.names), Layout(tensor=2)
    held = [imported(source, layout, rank)[1] for rank in range(2)]
    for name, tensor in table.import_tensors(source):
        entry = next(e for e in table.entries if e.megatron == name)
        for rank in range(2):
            want = entry.partition.shard(tensor, rank, 2).contiguous()
            # Random bytes hold NaN, so bits are compared.
            assert torch.equal(held[rank][name].view(torch.uint8), want.view(torch.uint8)), name


def main() -> None:
    """Runs all cases."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--vocab", type=int, default=31040)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="relax-bridge-", dir=args.folder))
    try:
        source = make(folder / "source", args.layers, args.vocab)
        check(source)
        gc.collect()
        files = [source.path / file for file in source.files]
        total = sum(file.stat().st_size for file in files)
        for tensor in (1, 2):
            report(
                f"import, tensor {tensor}",
                total // tensor,
                args.rounds,
                lambda t=tensor: import_case(source, files, t),
            )
        table = model_map(source.config, names=source.names)
        held = dict(table.import_tensors(source))
        out = folder / "out"
        export(table, held, source, out)
        assert all((out / f.name).read_bytes() == f.read_bytes() for f in files), "export is not the source"
        memory = torch.zeros(max(f.stat().st_size for f in files), dtype=torch.uint8)
        sizes = [file.stat().st_size for file in files]
        report(
            "export, one rank to disk",
            total,
            args.rounds,
            lambda: (export(table, held, source, out), write_plain(folder, sizes, memory)),
        )
    finally:
        shutil.rmtree(folder)


def import_case(source: Checkpoint, files: list[Path], tensor: int) -> tuple[float, float]:
    """Seconds of rank 0's import, and of reading as many bytes."""
    took, held = imported(source, Layout(tensor=tensor), 0)
    share = sum(x.nbytes for x in held.values()) / sum(f.stat().st_size for f in files)
    del held
    gc.collect()
    return took, read_plain(files, min(1.0, share))


def export(table, held, source, out) -> float:
    """Seconds to write the checkpoint from a rank's parameters."""
    began = time.perf_counter()
    buckets = export_buckets(table, held, bucket_bytes=2**28, like=source)
    write_checkpoint(out, (item for bucket in buckets for item in bucket.items()), like=source)
    return time.perf_counter() - began


def report(case: str, size: int, rounds: int, run) -> None:
    """Prints a case's line."""
    times = [run() for _ in range(rounds)]
    ratios = sorted(ours / plain for ours, plain in times)
    line = {
        "case": case,
        "gigabytes": round(size / 1e9, 2),
        "seconds": round(min(ours for ours, _ in times), 3),
        "copy_seconds": round(min(plain for _, plain in times), 3),
        "ratio": round(min(t for t, _ in times) / min(p for _, p in times), 2),
        "ratios": [round(r, 2) for r in ratios],
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

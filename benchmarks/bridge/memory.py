"""Peak memory of import and gathered export on two tensor-parallel ranks, against the owned shard and two
buckets.

    uv run python benchmarks/bridge/memory.py --folder /some/disk

Anonymous memory of each process is sampled every 2 ms; what it had before the import is taken off. Every
tensor of the export is compared with the source in a first pass.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from relax_bridge import Checkpoint, Layout, ProcessGroupExchange, export_buckets, import_shards, model_map
from slice import make


class Peak:
    """The most anonymous memory of this process inside the block, in bytes above `base`."""

    def __init__(self, base: int) -> None:
        self.base, self.most, self._stop = base, 0, threading.Event()

    def __enter__(self) -> "Peak":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, anonymous() - self.base)
            time.sleep(0.002)


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def rank_main(source: str, store: str, rank: int, bucket_bytes: int) -> None:
    """One rank; prints its line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    checkpoint, layout = Checkpoint.open(source), Layout(tensor=2)
    table = model_map(checkpoint.config, names=checkpoint.names)
    base = anonymous()
    with Peak(base) as importing:
        held = {s.entry.megatron: x for s, x in import_shards(table, checkpoint, layout=layout, rank=rank)}
    owned = sum(x.nbytes for x in held.values())

    def buckets():
        return export_buckets(
            table,
            held,
            bucket_bytes=bucket_bytes,
            layout=layout,
            rank=rank,
            exchange=ProcessGroupExchange(to=0),
            like=checkpoint,
        )

    for bucket in buckets():
        for name, x in bucket.items():
            assert torch.equal(x.view(torch.uint8), checkpoint.tensor(name).view(torch.uint8)), name
    with Peak(base) as exporting:
        largest = max((sum(x.nbytes for x in bucket.values()) for bucket in buckets()), default=0)
    line = {
        "rank": rank,
        "owned_mb": owned >> 20,
        "bucket_mb": bucket_bytes >> 20,
        "largest_bucket_mb": largest >> 20,
        "import_peak_mb": importing.most >> 20,
        "export_peak_mb": exporting.most >> 20,
        "allowed_mb": (owned + 2 * bucket_bytes) >> 20,
        "within": max(importing.most, exporting.most) <= owned + 2 * bucket_bytes,
    }
    print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Makes the checkpoint and starts both ranks."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--bucket-mb", type=int, default=256)
    options.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.rank:
        rank_main(args.rank[0], args.rank[1], int(args.rank[2]), args.bucket_mb << 20)
        return
    folder = Path(tempfile.mkdtemp(prefix="relax-bridge-", dir=args.folder))
    try:
        source = make(folder / "source", args.layers, 8192)
        command = [sys.executable, __file__, "--bucket-mb", str(args.bucket_mb), "--rank", str(source.path)]
        ranks = [subprocess.Popen([*command, str(folder / "store"), str(rank)]) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""How long a weight update takes from a trainer to an engine process, against the copy bandwidth of its path.

    python benchmarks/weights/update.py --path ipc        # trainer and engine on one GPU
    python benchmarks/weights/update.py --path broadcast  # a GPU for each, NCCL
    python benchmarks/weights/update.py --path files --device cpu --size tiny

The trainer holds Megatron tensors and converts them with relax-bridge. The engine is relax-rollout's own
receiver over plain modules, target and draft, that fuse parameters as SGLang does: SGLang itself is not part
of the figure, and control messages travel through a pipe. One JSON line per size, printed once all digests
agreed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from models import Trainer, dtype_of, engine_models
from relax_rollout.digest import tensor_digests
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSender, BroadcastSource
from relax_rollout.weights.bucket import Bucket, pack, plan
from relax_rollout.weights.files import BucketFiles, FileSource
from relax_rollout.weights.ipc import IpcReceiver, IpcSender
from relax_rollout.weights.packing import Packing
from relax_rollout.weights.receiver import Receiver
from torch import Tensor

COPY_BYTES = 2**30
COPIES = 8


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_copy(once: Callable[[], None], device: torch.device, nbytes: int) -> float:
    """GB/s of the quickest of some copies."""
    best = 0.0
    for _ in range(COPIES):
        sync(device)
        start = time.perf_counter()
        once()
        sync(device)
        best = max(best, nbytes / (time.perf_counter() - start) / 1e9)
    return best


@dataclass
class Place:
    """Where the engine is and how weights come there."""

    path: str
    size: str
    device: torch.device
    port: int
    replay: bool

    def group(self, rank: int) -> BroadcastGroup:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return BroadcastGroup(("127.0.0.1", self.port), rank, 2, backend, 120.0, "weights")


def engine(place: Place, pipe: Connection) -> None:
    """The engine's process: answers messages until None comes."""
    torch.set_num_threads(1)
    device, opened, group = place.device, IpcReceiver(), None
    lists: dict[int, Bucket] = {}
    damaged: list[str] = []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    models = engine_models(place.size, device)
    shapes = {name: (tuple(shape), dtype_of(name)) for name, shape in Trainer.hf_shapes(place.size).items()}
    receiver = Receiver(models, shapes, device, replay=place.replay)
    if place.path == "broadcast":
        group = place.group(1)
        group.join()
    sync(device)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        call, *fields = message
        if call == "copy":
            pipe.send(copy_bandwidth(place, group, opened, *fields))
        elif call == "begin":
            receiver.begin(*fields)
        elif call == "receive":
            update, number, sent, told = fields
            bucket = lists[told] = lists[told] if sent is None else sent
            if group is not None:
                source: Any = BroadcastSource(group)
            elif bucket.file is not None:
                source = FileSource(bucket.file)
            else:
                source = opened.source(bucket.handle or "")
            received = receiver.receive(update, number, bucket, source)
            damaged += [e.name for e in bucket.entries if received and received[e.name] != e.digest]
        else:
            start = time.perf_counter()
            result = receiver.commit(*fields)
            sync(device)
            pipe.send((result, damaged, time.perf_counter() - start))


def copy_bandwidth(
    place: Place, group: BroadcastGroup | None, opened: IpcReceiver, nbytes: int, where: str
) -> float:
    """Of the engine's end: out of the trainer's memory, its file, or as the other end of its broadcasts."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=place.device)
    if group is not None:
        return best_copy(lambda: group.broadcast(target), place.device, nbytes)
    if place.path == "files":
        source = torch.from_file(where, shared=True, size=nbytes, dtype=torch.uint8)
    else:
        source = opened.open(where, place.device)[:nbytes]
    return best_copy(lambda: target.copy_(source), place.device, nbytes)


class Sender:
    """The trainer's end: converts, makes buckets and sends them."""

    def __init__(
        self, place: Place, pipe: Connection, trainer: Trainer, group: BroadcastGroup | None
    ) -> None:
        self.path, self.pipe, self.trainer, self.group = place.path, pipe, trainer, group
        self.device = next(iter(trainer.buffers.values())).device
        lent = trainer.buffers.values() if self.device.type != "cpu" else ()
        self.packing = Packing(self.device, lent=lent, recorded=True)
        self.broadcasts = BroadcastSender(group, self.device) if group is not None else None
        self.files = BucketFiles() if place.path == "files" else None
        self.version = 0
        self.lists: list[Bucket] = []

    def update(self, limit: int, verify: bool) -> dict[str, float]:
        """One update, timed.

        Args:
            limit: bytes of a bucket.
            verify: digest every tensor at both ends, before it is loaded too, and compare.
        """
        self.version += 1
        name = str(self.version)
        self.trainer.step()
        sync(self.device)
        start = time.perf_counter()
        self.pipe.send(("begin", name, self.version))
        count = 0
        wanted: dict[str, str | None] = {}
        for tensors, bucket in self.buckets(limit, verify):
            self.pipe.send(("receive", name, count, *self.listed(bucket)))
            if self.broadcasts is not None:
                self.broadcasts.send(tensors, bucket.entries)
            wanted |= {e.name: e.digest for e in bucket.entries}
            count += 1
        self.pipe.send(("commit", name, count, None if verify else ()))
        sent = time.perf_counter() - start
        result, damaged, load = self.pipe.recv()
        seconds = time.perf_counter() - start
        wrong = [n for n in result["digests"] if result["digests"][n] != wanted[n]]
        assert not wrong, f"the engine serves other values of {wrong[:8]}"
        assert len(result["digests"]) == (len(wanted) if verify else 0)
        assert not damaged
        assert not result["stale"]
        if self.broadcasts is not None:
            self.broadcasts.finish()
        if self.files is not None:
            self.files.close()
            self.files = BucketFiles()
        return {"seconds": seconds, "send_s": sent, "commit_s": load}

    def check(self, limit: int) -> None:
        """An update after which the engine serves what the weights are when they are converted once more."""
        self.update(limit, verify=True)
        wanted = tensor_digests(dict(self.trainer.export()))
        self.pipe.send(("commit", str(self.version), 0))
        result, *_ = self.pipe.recv()
        assert result["digests"] == wanted

    def listed(self, bucket: Bucket) -> tuple[Bucket | None, int]:
        """A bucket and its number; without digests the number alone if the engine has got it already."""
        if bucket.entries[0].digest is not None:
            return bucket, -1
        number = next((n for n, other in enumerate(self.lists) if other == bucket), len(self.lists))
        if number < len(self.lists):
            return None, number
        self.lists.append(bucket)
        return bucket, number

    def buckets(self, limit: int, verify: bool) -> Iterator[tuple[dict[str, Tensor], Bucket]]:
        """By IPC as many as there are memories; else one is made while the one before travels."""
        if self.path == "ipc":
            for bucket in self.packing(lambda: buckets_of(self.trainer, limit), {}, digests=verify):
                yield {}, bucket
            return
        for tensors in buckets_of(self.trainer, limit):
            entries, nbytes = plan(tensors, tensor_digests(tensors) if verify else {})
            where = None
            if self.files is not None:
                where, buffer = self.files.create(nbytes)
                pack(tensors, entries, buffer)
            yield tensors, Bucket(tuple(entries), nbytes, file=where)

    def copy_bandwidth(self) -> float:
        nbytes = COPY_BYTES if self.device.type == "cuda" else 2**26
        if self.group is not None:
            self.pipe.send(("copy", nbytes, ""))
            source, group = torch.empty(nbytes, dtype=torch.uint8, device=self.device), self.group
            best_copy(lambda: group.broadcast(source), self.device, nbytes)
        elif self.files is not None:
            where, _ = self.files.create(nbytes)
            self.pipe.send(("copy", nbytes, where))
        else:
            source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
            lent = IpcSender([source] if self.device.type != "cpu" else ())
            (bucket,) = lent.buckets({"copy": source}, {})
            self.pipe.send(("copy", nbytes, bucket.handle))
        found: float = self.pipe.recv()
        return found


def buckets_of(trainer: Trainer, limit: int) -> Iterator[dict[str, Tensor]]:
    """Converts as it goes: while a bucket travels the next one is made."""
    found: dict[str, Tensor] = {}
    size = 0
    for name, tensor in trainer.export():
        if found and size + tensor.nbytes > limit:
            yield found
            found, size = {}, 0
        found[name] = tensor
        size += tensor.nbytes
    yield found


def run(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """One size: updates until all digests agreed, then timed ones, then all digests once more."""
    cuda = args.device == "cuda"
    here = torch.device("cuda", 0) if cuda else torch.device("cpu")
    there = torch.device("cuda", int(args.path == "broadcast")) if cuda else torch.device("cpu")
    place = Place(args.path, size, there, 0, not args.loader)
    own = Place(args.path, size, here, 0, False)
    group = own.group(0) if args.path == "broadcast" else None
    place.port = group.port if group is not None else 0
    pipe, other = mp.Pipe()
    child = mp.get_context("spawn").Process(target=engine, args=(place, other), daemon=True)
    child.start()
    other.close()
    trainer = Trainer(size, here)
    if group is not None:
        group.join()
    assert pipe.recv() == "ready"
    sender = Sender(own, pipe, trainer, group)
    limit = args.bucket_mb * 2**20 if args.path != "ipc" else 2**62
    for _ in range(3):
        sender.check(limit)
    verified = min(sender.update(limit, verify=True)["seconds"] for _ in range(args.repeats))
    best = min((sender.update(limit, verify=False) for _ in range(args.repeats)), key=lambda r: r["seconds"])
    sender.check(limit)
    bandwidth = sender.copy_bandwidth()
    pipe.send(None)
    child.join()
    nbytes = sum(t.nbytes for t in dict(trainer.export()).values())
    rate = nbytes / best["seconds"] / 1e9
    return {
        "case": args.path, "size": size, "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "gigabytes": round(nbytes / 1e9, 3), **{name: round(value, 5) for name, value in best.items()},
        "verified_s": round(verified, 5), "gb_per_s": round(rate, 2), "copy_gb_per_s": round(bandwidth, 2),
        "share": round(rate / bandwidth, 3), "loads_by": "loader" if args.loader else "replay",
        "engine": "own receiver over plain modules, not SGLang",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--path", choices=["ipc", "broadcast", "files"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", nargs="+", default=["2B", "4B"])
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--loader", action="store_true", help="load through the model's loader, not its copies"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.size:
        sys.stdout.write(json.dumps(run(size, args)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

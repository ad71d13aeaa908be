"""How long a weight update takes from a trainer to an engine process, against the copy bandwidth of its path.

    torchrun --nproc-per-node 2 benchmarks/weights/update.py --path ipc        # both processes on one GPU
    torchrun --nproc-per-node 2 benchmarks/weights/update.py --path broadcast  # a GPU for each
    torchrun --nproc-per-node 2 benchmarks/weights/update.py --path files --device cpu --size tiny

Rank 0 is the trainer, rank 1 the engine. The engine is relax-rollout's own receiver over a plain module that
fuses parameters as SGLang does: SGLang itself is not part of the figure. One JSON line per case and size.
"""

import argparse
import json
import secrets
import sys
import time

import torch
import torch.distributed as dist
from models import Engine, dtype_of, tensors
from relax_rollout import tensor_digest
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSource
from relax_rollout.weights.bucket import Entry, pack, plan
from relax_rollout.weights.files import BucketFiles, FileSource
from relax_rollout.weights.ipc import IpcSource, ipc_handle
from relax_rollout.weights.receiver import Receiver

CHECKED = 8
"""Tensors whose digests are compared after each update; digests of all are timed apart."""


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def told(message: object) -> object:
    box = [message]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def buckets_of(weights: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if found[-1] and size + tensor.nbytes > limit:
            found.append({})
            size = 0
        found[-1][name] = tensor
        size += tensor.nbytes
    return found


class Sender:
    def __init__(self, path: str, device: torch.device, group: BroadcastGroup | None) -> None:
        self.path, self.device, self.group = path, device, group
        self.files = BucketFiles() if path == "files" else None
        self.kept: list[torch.Tensor] = []

    def prepare(self, tensors_: dict[str, torch.Tensor]) -> tuple[list[Entry], torch.Tensor, str]:
        entries, nbytes = plan(tensors_, {})
        if self.files is not None:
            where, buffer = self.files.create(nbytes)
        else:
            where, buffer = "", torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        pack(tensors_, entries, buffer)
        if self.path == "ipc":
            sync(self.device)
            self.kept.append(buffer)
            where = ipc_handle(buffer)
        return entries, buffer, where


def reference(path: str, device: torch.device, group: BroadcastGroup | None, nbytes: int) -> float:
    """GB/s of one plain copy, or broadcast, of a buffer of 1 GiB (CPU: of the model's size)."""
    size = 2**30 if device.type == "cuda" else max(nbytes, 2**20)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def once() -> None:
        if group is None:
            target.copy_(source)
        else:
            group.broadcast(target)

    best = 0.0
    for _ in range(6):
        dist.barrier()
        sync(device)
        start = time.perf_counter()
        once()
        sync(device)
        best = max(best, size / (time.perf_counter() - start) / 1e9)
    return best


def one_update(args, rank, device, weights, receiver, group, version) -> dict[str, float]:
    update = f"{version}-{secrets.token_hex(2)}"
    sender = Sender(args.path, device, group)
    if receiver is not None:
        receiver.begin(str(told(None)), version)
    else:
        told(update)
    dist.barrier()
    start = time.perf_counter()
    parts = buckets_of(weights, args.bucket_mb * 2**20) if rank == 0 else []
    count = told(len(parts))
    assert isinstance(count, int)
    for place in range(count):
        if rank == 0:
            entries, buffer, where = sender.prepare(parts[place])
            told(([entry.to_json() for entry in entries], where))
            if group is not None:
                group.broadcast(buffer)
        else:
            listed, where = told(None)
            if group is not None:
                source = BroadcastSource(group)
            else:
                source = {"ipc": IpcSource, "files": FileSource}[args.path](where)
            receiver.receive(receiver.staged.update, place, [Entry.from_json(e) for e in listed], source)
    received = time.perf_counter()
    result = None
    if receiver is not None:
        sync(device)
        loading = time.perf_counter()
        result = receiver.commit(receiver.staged.update, count, args.names[:CHECKED])
        sync(device)
        committed = time.perf_counter() - loading
    dist.barrier()
    total = time.perf_counter() - start
    digests = [result and result["digests"], committed if receiver is not None else 0.0]
    dist.broadcast_object_list(digests, src=1)
    if rank == 0:
        wrong = [n for n, d in digests[0].items() if d != tensor_digest(weights[n])]
        assert not wrong, f"the engine serves other values: {wrong}"
        assert len(digests[0]) == min(CHECKED, len(weights))
    if sender.files is not None:
        sender.files.close()
    return {"seconds": total, "send_s": received - start, "commit_s": digests[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--path", choices=["ipc", "broadcast", "files"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", nargs="+", default=["2B", "4B"])
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    index = rank if args.path == "broadcast" else 0
    device = torch.device(args.device, index) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = None
    if args.path == "broadcast":
        box: list[object] = [None]
        made = None
        backend = "nccl" if device.type == "cuda" else "gloo"
        if rank == 0:
            made = BroadcastGroup(("127.0.0.1", 0), 0, 2, backend, 120.0, "weights")
            box = [made.port]
        dist.broadcast_object_list(box, src=0)
        group = made or BroadcastGroup(("127.0.0.1", int(str(box[0]))), 1, 2, backend, 120.0, "weights")
        group.join()
    for size in args.size:
        listed = tensors(size)
        args.names = [name for name, _, _ in listed][:: max(1, len(listed) // CHECKED)]
        weights: dict[str, torch.Tensor] = {}
        receiver = None
        if rank == 0:
            generator = torch.Generator(device=device).manual_seed(0)
            for name, _, shape in listed:
                weights[name] = torch.randn(shape, generator=generator, device=device).to(dtype_of(name))
        else:
            shapes = {name: (shape, dtype_of(name)) for name, _, shape in listed}
            receiver = Receiver({"target": Engine(size, device)}, shapes, device)
        nbytes = sum(torch.Size(s).numel() * dtype_of(n).itemsize for n, _, s in listed)
        runs = []
        for version in range(args.repeats + 1):
            for tensor in weights.values():
                tensor.neg_()
            runs.append(one_update(args, rank, device, weights, receiver, group, version))
        bandwidth = reference(args.path, device, group, nbytes)
        best = min(runs[1:], key=lambda r: r["seconds"])
        rate = nbytes / best["seconds"] / 1e9
        line = {
            "case": args.path, "size": size, "device": torch.cuda.get_device_name(device)
            if device.type == "cuda" else "cpu", "gigabytes": round(nbytes / 1e9, 3),
            **{name: round(value, 4) for name, value in best.items()}, "gb_per_s": round(rate, 2),
            "copy_gb_per_s": round(bandwidth, 2), "share": round(rate / bandwidth, 3),
            "engine": "own receiver over a plain module, not SGLang",
        }  # fmt: skip
        if rank == 0:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        del weights, receiver
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

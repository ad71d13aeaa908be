"""The exchange over torch.distributed, between real processes."""

import json
import os
import subprocess
import sys

import torch

RANK = """
import json, sys, torch, torch.distributed as dist
from relax_bridge import Checkpoint, Layout, ProcessGroupExchange, export_buckets, import_shards, model_map

source, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
checkpoint = Checkpoint.open(source)
table = model_map(checkpoint.config, names=checkpoint.names)
counts = []
for layout in (Layout(tensor=2), Layout(pipeline=2)):
    held = {shard.name: x for shard, x in import_shards(table, checkpoint, layout=layout, rank=rank)}
    for to in (0, 1, None):
        counts.append(0)
        for bucket in export_buckets(
            table, [held], bucket_bytes=2000, layout=layout, rank=rank,
            exchange=ProcessGroupExchange(to=to), like=checkpoint,
        ):
            for name, x in bucket.items():
                assert torch.equal(x, checkpoint.tensor(name)), name
                counts[-1] += 1
print(json.dumps(counts))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_export_the_source_to_one_of_them_or_to_both(tiny, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tiny.path), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    every = len(tiny.names)
    assert json.loads(outputs[0]) == [every, 0, every] * 2
    assert json.loads(outputs[1]) == [0, every, every] * 2


def test_a_single_rank_needs_none():
    from relax_bridge.exchange import NoExchange

    assert NoExchange().receives(0)
    (mine,) = NoExchange().start(torch.empty(0, dtype=torch.uint8), [0])()
    assert mine.numel() == 0

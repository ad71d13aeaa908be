"""`time_steps`: how long a row's optimizer steps take on its layout, at sizes that say something of speed."""

import statistics
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from relax_bridge import model_map

from relax_core.device import ParallelConfig, World
from relax_core.model import MtpConfig, Qwen35Config, Qwen35Model
from relax_core.model.build import build_chunks
from relax_core.model.placement import Placement
from relax_core.testing.row import Row
from relax_core.testing.task import model_config
from relax_core.testing.training import make_objective
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer


def time_steps(
    row: Row, world: World, *, samples: int, tokens: int, warmup: int = 2, steps: int = 4
) -> dict[str, Any] | None:
    """Steps on a batch of equal samples, each a row of its own, from the same weights in every layout.

    Args:
        row: the layout and the model; its loss is that of supervised fine-tuning.
        world: of this process.
        samples: of the batch.
        tokens: of a sample, random, all of them targets but the first.
        warmup: steps before those that are timed.
        steps: that are timed.

    Returns:
        On rank 0 `loss` and `grad_norm` of the first step; `ms`, the median step of the slowest rank;
        `peak_gib`, the largest of the ranks.
    """
    # What the jobs before left behind.
    world.device.empty_cache()
    trainer = _trainer(row, world, tokens)
    vocabulary = trainer.chunks[-1].model_config.vocab_size
    generator = torch.Generator().manual_seed(1)
    mask_L = torch.ones(tokens)
    mask_L[0] = 0
    batch = [
        Sample(torch.randint(0, vocabulary, (tokens,), generator=generator), mask_L) for _ in range(samples)
    ]
    objective = make_objective(row)
    first = trainer.step(batch, objective).values
    for _ in range(warmup - 1):
        trainer.step(batch, objective)
    world.device.reset_peak_memory()
    taken = []
    for _ in range(steps):
        world.device.synchronize()
        started = time.perf_counter()
        trainer.step(batch, objective)
        world.device.synchronize()
        taken.append(1e3 * (time.perf_counter() - started))
    largest = torch.tensor(
        [statistics.median(taken), world.device.memory().peak / 2**30],
        dtype=torch.float64,
        device=world.torch_device,
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if world.rank != 0:
        return None
    milliseconds, peak = largest.tolist()
    return {
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "ms": round(milliseconds, 1),
        "peak_gib": round(peak, 1),
    }


def _trainer(row: Row, world: World, tokens: int) -> Trainer:
    facts, parallel, mtp = model_config(row), ParallelConfig(**row.parallel), MtpConfig(**row.draft)
    config = TrainerConfig(
        **{"lr": 1e-5, "micro_batch_tokens": tokens, "precision": row.precision, **row.trainer}
    )
    chunks = build_chunks(
        Qwen35Config.from_hf(facts),
        parallel,
        dtype=torch.bfloat16 if row.precision == "bf16" else torch.float32,
        recompute=config.recompute,
        mtp=mtp,
        device=world.torch_device,
        random_weights=False,
    )
    _draw(chunks, Placement(model_map(facts)), world.torch_device)
    return Trainer(chunks, config, mtp, device=world.torch_device, optimizer_steps=100, parallel=parallel)


@torch.no_grad()
def _draw(chunks: list[Qwen35Model], placement: Placement, device: torch.device) -> None:
    """Each whole weight is drawn on the device, by its name, and this rank keeps its share."""
    shapes = placement.table.megatron_shapes()
    for name, part in placement.parts(chunks).items():
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shapes[name], generator=generator, device=device)
        group = placement.tensor_ranks(name)
        spread = 0.02 if whole.dim() == 2 else 0.3
        mine = placement.entries[name].partition.shard(whole * spread, group.rank(), group.size())
        part.of(part.parameter).copy_(mine)

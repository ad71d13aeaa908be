"""Memory and time of optimizer steps on random weights: what a plan says, measured."""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from relax_kernels import LogProbs
from relax_rollout.pictures import Picture, PlacedPicture
from torch import Tensor

from relax_core.algorithms import AlgorithmConfig, Sequences
from relax_core.device import ParallelConfig, World
from relax_core.loop.objectives import SftObjective
from relax_core.model import MtpConfig, Qwen35Config
from relax_core.model.build import build_chunks, freeze_tower
from relax_core.model.lora_config import LoraConfig
from relax_core.model.vision.config import VisionConfig
from relax_core.plan.workload import PICTURE_TOKENS
from relax_core.testing.row import Row
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.objective import Terms
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer


class _Watched(SftObjective):
    """Notes the allocated bytes when the trunk's forward pass and log-probs are done."""

    def __init__(self, world: World) -> None:
        super().__init__(AlgorithmConfig(name="sft"))
        self._world = world
        self.allocated = 0

    def terms(self, scored: LogProbs, columns_S: Mapping[str, Tensor], sequences: Sequences) -> Terms:
        self.allocated = max(self.allocated, self._world.device.memory().allocated)
        return super().terms(scored, columns_S, sequences)


def measure(
    row: Row, world: World, *, facts: Mapping[str, Any], lengths: Sequence[int], warmup: int, steps: int
) -> list[dict[str, Any]]:
    """Bytes and seconds of every rank.

    Args:
        row: layout and settings; of its model only pictures and adapters are used.
        world: this rank.
        facts: the model's `config.json`.
        lengths: tokens of the samples of one step; all but the first of each are targets.
        warmup: steps that do not count.
        steps: steps that count.

    Returns:
        For each rank: `weights` (allocated after the model was built), `static` (after the trainer was),
        `forward` (after the forward pass; 0 without the head), `peak` and `reserved` of the steps, all in
        bytes; `seconds` of each step; `loss`.
    """
    gc.collect()
    world.device.empty_cache()
    parallel, mtp = ParallelConfig(**row.parallel), MtpConfig(**row.draft)
    config = TrainerConfig(**{"lr": 1e-5, "precision": row.precision, **row.trainer})
    model = Qwen35Config.from_hf(facts, vision=row.pictures != "none")
    before = world.device.memory().allocated
    chunks = build_chunks(
        model,
        parallel,
        dtype=torch.bfloat16 if row.precision == "bf16" else torch.float32,
        recompute=config.recompute,
        mtp=mtp,
        device=world.torch_device,
        lora=LoraConfig(**row.lora) if row.lora else None,
    )
    if row.pictures == "frozen":
        freeze_tower(chunks)
    weights = world.device.memory().allocated - before
    trainer = Trainer(chunks, config, mtp, device=world.torch_device, optimizer_steps=1000, parallel=parallel)
    static = world.device.memory().allocated - before
    samples = [_sample(length, model, number) for number, length in enumerate(lengths)]
    objective = _Watched(world)
    seconds, loss = [], 0.0
    for step in range(warmup + steps):
        if step == warmup:
            world.device.reset_peak_memory()
        world.device.synchronize()
        dist.barrier()
        started = time.perf_counter()
        loss = trainer.step(samples, objective).values["loss"]
        world.device.synchronize()
        seconds.append(time.perf_counter() - started)
    memory = world.device.memory()
    found: dict[str, Any] = {
        "weights": weights, "static": static, "peak": memory.peak - before, "reserved": memory.reserved,
        "forward": max(0, objective.allocated - before), "seconds": seconds[warmup:],
        "first_seconds": seconds[0], "median_seconds": statistics.median(seconds[warmup:]), "loss": loss,
        "total": memory.total,
    }  # fmt: skip
    everyone: list[dict[str, Any]] = [{}] * world.size
    dist.all_gather_object(everyone, found)
    return everyone


def _sample(length: int, model: Qwen35Config, number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    mask_L = torch.ones(length)
    mask_L[0] = 0
    tokens_L = torch.randint(0, model.vocab_size, (length,), generator=generator)
    pictures = (_picture(model.vision, length, number),) if model.vision is not None else ()
    return Sample(tokens_L, mask_L, group=number, pictures=pictures)


def _picture(vision: VisionConfig, length: int, number: int) -> PlacedPicture:
    """A square picture of the tokens that a plan assumes, or as many as half the sample has room for."""
    side = isqrt(min(PICTURE_TOKENS, length // 2)) * vision.merge
    channels, frames, height, width = vision.patch_shape
    numbers = np.random.default_rng(number)
    codes = numbers.integers(0, 256, (side * side, channels, 1, height * width), dtype=np.uint8)
    values_CV = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (channels, 1))
    return PlacedPicture(Picture((1, side, side), vision.merge, codes, values_CV, frames), 1)

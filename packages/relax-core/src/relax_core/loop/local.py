"""The policy in this process, or this process's share of it."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, ModelMap, model_map, write_checkpoint
from relax_rollout import RolloutEngine
from torch import Tensor
from torch._C._distributed_c10d import Store

from relax_core.config.root import RelaxConfig
from relax_core.device import ParallelConfig, World, initialise, shutdown
from relax_core.device.registry import choose_device
from relax_core.loop.checkpoints import open_checkpoint
from relax_core.loop.weights import update_engine
from relax_core.model import Qwen35Config, Qwen35Model
from relax_core.model.build import build_chunks
from relax_core.model.placement import Placement
from relax_core.trainer.checkpoint import CheckpointWriter, load_checkpoint
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics
from relax_core.trainer.trainer import Trainer

_log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LocalPolicy:
    """A `Policy` on this process, or this process's share of it.

    Where several ranks share the model every call is made on all of them at once.

    Attributes:
        world: device and rank.
        weights: names and shapes between the checkpoint it starts from and the model.
        trainer: the policy and its optimizer.
        reference: the frozen reference policy, if the algorithm needs one.
    """

    def __init__(
        self,
        world: World,
        source: Checkpoint,
        weights: ModelMap,
        trainer: Trainer,
        reference: list[Qwen35Model] | None,
    ) -> None:
        self.world = world
        self.weights = weights
        self.trainer = trainer
        self.reference = reference
        self._source = source
        self._placement = Placement(weights)

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[Tensor]:
        """See `Policy`."""
        if reference:
            assert self.reference is not None, "the algorithm needs no reference policy"
        return self.trainer.score(
            samples, temperature=temperature, model=self.reference if reference else None
        )

    def step(self, samples: Sequence[Sample], objective: TrainingObjective) -> StepMetrics:
        """See `Policy`."""
        return self.trainer.step(samples, objective)

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """See `Policy`."""
        return await update_engine(engine, self.export_tensors(), version)

    def export_tensors(self, like: Checkpoint | None = None) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in Hugging Face names, in the trainer's precision or in `like`'s dtypes."""
        return self.weights.export_tensors(self._placement.whole(self.trainer.chunks), like=like)

    def export(self, directory: Path) -> None:
        """See `Policy`."""
        tensors = self.export_tensors(self._source if self._source.names else None)
        if self.world.rank == 0:
            write_checkpoint(directory, tensors, like=self._source)
        else:
            for _ in tensors:
                pass

    def save_to(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        """See `Policy`."""
        self._writer = CheckpointWriter(root, self.trainer, keep=keep, asynchronous=asynchronous)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Policy`."""
        self._writer.save(step, state)

    def finish_saves(self) -> None:
        """See `Policy`."""
        self._writer.finish()

    def load(self, directory: Path) -> dict[str, Any]:
        """See `Policy`."""
        return load_checkpoint(directory, self.trainer)


@contextmanager
def open_policy(
    config: RelaxConfig, source: Checkpoint, weights: ModelMap, *, store: Store | None = None
) -> Iterator[LocalPolicy]:
    """Takes the device and loads the model, or this rank's share of it; leaves the process as it was.

    Args:
        config: the run's.
        source, weights: the checkpoint to start from and its weight map, from `open_model`.
        store: where the ranks meet; see `relax_core.device.initialise`.

    Raises:
        ValueError: the checkpoint does not fit, naming every tensor or setting that is wrong.
    """
    started = time.perf_counter()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    sizes = Qwen35Config.from_hf(source.config)
    world = initialise(
        choose_device(config.run.device), config.parallel, seed=config.run.seed % 2**31, store=store
    )
    try:
        policy = _load(source, weights, sizes, config, world)
        reference = (
            _load_reference(policy, sizes, config, world) if config.algorithm.needs_reference else None
        )
        trainer = Trainer(
            policy,
            config.trainer,
            config.mtp,
            device=world.torch_device,
            optimizer_steps=config.run.steps * config.trainer.optimizer_steps_per_batch,
            parallel=config.parallel,
        )
        _log.info(
            "model %s on %s, %d parameters, ready after %.1f s",
            config.model.path,
            world.device.name,
            sum(p.numel() for chunk in policy for p in chunk.parameters()),
            time.perf_counter() - started,
        )
        yield LocalPolicy(world, source, weights, trainer, reference)
    finally:
        shutdown()


def _build(
    sizes: Qwen35Config, config: RelaxConfig, world: World, *, random_weights: bool
) -> list[Qwen35Model]:
    parallel: ParallelConfig = config.parallel
    return build_chunks(
        sizes,
        parallel,
        dtype=_DTYPES[config.trainer.precision],
        recompute=config.trainer.recompute,
        mtp=config.mtp,
        device=world.torch_device,
        random_weights=random_weights,
    )


def _load(
    source: Checkpoint, weights: ModelMap, sizes: Qwen35Config, config: RelaxConfig, world: World
) -> list[Qwen35Model]:
    chunks = _build(sizes, config, world, random_weights=not source.names)
    if source.names:
        Placement(weights).load(chunks, source)
    return chunks


@torch.no_grad()
def _load_reference(
    policy: Sequence[Qwen35Model], sizes: Qwen35Config, config: RelaxConfig, world: World
) -> list[Qwen35Model]:
    """The frozen reference: another checkpoint with a config of its own, or the policy as it starts."""
    path = config.model.reference_path
    if path is None:
        chunks = _build(sizes, config, world, random_weights=False)
        for mine, theirs in zip(chunks, policy, strict=True):
            for frozen, trained in zip(mine.parameters(), theirs.parameters(), strict=True):
                frozen.copy_(trained)
    else:
        source = open_checkpoint(path)
        weights = model_map(source.config, names=source.names)
        chunks = _load(source, weights, Qwen35Config.from_hf(source.config), config, world)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return chunks

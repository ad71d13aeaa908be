"""The policy in this process, or this process's share of it."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, HfShard, ModelMap, model_map, write_checkpoint
from relax_rollout import RolloutEngine
from torch import Tensor
from torch._C._distributed_c10d import Store

from relax_core.config.root import RelaxConfig
from relax_core.device import ParallelConfig, World, initialise, shutdown
from relax_core.device.registry import choose_device
from relax_core.loop.adapter_export import adapter_tensors, write_adapter
from relax_core.loop.checkpoints import open_checkpoint
from relax_core.loop.kept import KeptWeights
from relax_core.loop.policy import Scored, Trained
from relax_core.loop.watch import Watch
from relax_core.loop.weights import retried, update_engine
from relax_core.model import MtpConfig, Qwen35Config, Qwen35Model
from relax_core.model.arriving import all_arrived
from relax_core.model.build import build_chunks, freeze_tower
from relax_core.model.critic import copy_trunk
from relax_core.model.linear import adapters_off
from relax_core.model.lora_config import LoraConfig
from relax_core.model.placement import Placement, whole_share
from relax_core.run.trace import ProcessSpans, span
from relax_core.trainer.checkpoint import CheckpointWriter, load_checkpoint
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.objective import TrainingObjective
from relax_core.trainer.sample import Sample
from relax_core.trainer.step_metrics import StepMetrics
from relax_core.trainer.trainer import Trainer

_log = logging.getLogger(__name__)

CRITIC = "critic"
"""Folder of the critic's checkpoints, inside that of the policy's."""

LENT_BYTES = 2**20
"""Engines open memory of at least this size where it is; each costs them a message, so smaller is packed."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LocalPolicy:
    """A `Policy` on this process, or this process's share of it.

    Where several ranks share the model every call is made on all of them at once.

    Attributes:
        world: device and rank.
        weights: names and shapes between the checkpoint it starts from and the model.
        trainer: the policy and its optimizer.
        reference: the frozen reference policy, if the algorithm needs one that the policy's adapters cannot
            be left out for.
        critic: the critic and its optimizer, if the algorithm needs one.
        teacher: the frozen teacher, if the trainer scores with one.
        kept: what engines keep of the checkpoint that they start from.
    """

    def __init__(
        self,
        world: World,
        source: Checkpoint,
        weights: ModelMap,
        trainer: Trainer,
        reference: list[Qwen35Model] | None,
        critic: Trainer | None = None,
        lora: LoraConfig | None = None,
        teacher: list[Qwen35Model] | None = None,
        *,
        kept: KeptWeights,
        watch: Watch,
    ) -> None:
        self.world = world
        self.kept = kept
        self._watch = watch
        self.weights = weights
        self.trainer = trainer
        self.reference = reference
        self.teacher = teacher
        self._lora = lora
        self.critic = critic
        self._source = source
        self._placement = Placement(weights, lora)
        self._lent = False

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, of: Scored = "policy"
    ) -> list[Tensor]:
        """See `Policy`."""
        with self._watch.memory(), span(f"score {of}", "trainer", samples=len(samples)):
            return self._score(samples, temperature, of)

    def _score(self, samples: Sequence[Sample], temperature: float, of: Scored) -> list[Tensor]:
        if of == "critic":
            return self._trainer(of).score(samples)
        if of == "reference" and self.reference is None:
            # With adapters the policy as it started is still there.
            assert self._lora is not None, "the algorithm needs no reference policy"
            with adapters_off(self.trainer.chunks):
                return self.trainer.score(samples, temperature=temperature)
        if of in ("reference", "teacher"):
            frozen = self.reference if of == "reference" else self.teacher
            assert frozen is not None, "the algorithm needs no teacher in the trainer"
            return self.trainer.score(samples, temperature=temperature, model=frozen)
        return self.trainer.score(samples, temperature=temperature)

    def step(
        self, samples: Sequence[Sample], objective: TrainingObjective, *, of: Trained = "policy"
    ) -> StepMetrics:
        """See `Policy`."""
        with self._watch.memory(), span(f"train {of}", "trainer", samples=len(samples)) as shown:
            metrics = self._trainer(of).step(samples, objective)
            shown["tokens"] = metrics.tokens
        return metrics

    def _trainer(self, of: Trained) -> Trainer:
        if of == "policy":
            return self.trainer
        assert self.critic is not None, "the algorithm needs no critic"
        return self.critic

    async def update(self, engine: RolloutEngine, version: int) -> int:
        """See `Policy`."""
        self._lend(engine)
        return await retried(lambda: self.update_once(engine, version), version)

    async def update_once(self, engine: RolloutEngine, version: int) -> int:
        """`update` in one attempt, in which all ranks take part to its end.

        Raises:
            TransferError: tensors were lost on their way.
        """
        return await update_engine(engine, self.changing_tensors(), version, kept=self.kept)

    def changing_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in Hugging Face names, but those that engines keep."""
        kept = frozenset(self.kept.names)
        return ((name, tensor) for name, tensor in self.export_tensors() if name not in kept)

    def _lend(self, engine: RolloutEngine) -> None:
        """Lets an engine on this device read the weights where they are."""
        lend = getattr(engine, "lend", None)
        if lend is not None and self.world.torch_device.type != "cpu" and not self._lent:
            lend(self.own_memory())
            self._lent = True

    def changing_shares(self, engine_ranks: int, gathered: Collection[str] = ()) -> Iterator[HfShard]:
        """This rank's part of `changing_tensors`, those in `gathered` whole; see `Placement.shares`."""
        kept = frozenset(self.kept.names)
        shares = self._placement.shares(self.trainer.chunks, engine_ranks)
        return (whole_share(s) if s.name in gathered else s for s in shares if s.name not in kept)

    def own_memory(self) -> list[Tensor]:
        """The parameters of this rank that are worth opening where they are, and which stay there."""
        held = (p.detach() for chunk in self.trainer.chunks for p in chunk.parameters())
        return [p for p in held if p.untyped_storage().nbytes() >= LENT_BYTES]

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses of the parameters of this rank."""
        return tuple(p.data_ptr() for chunk in self.trainer.chunks for p in chunk.parameters())

    @property
    def holds_all(self) -> bool:
        """Whether this rank has whole weights, so that no other takes part in `changing_tensors`."""
        return self._placement.holds_all(self.trainer.chunks)

    def settle(self) -> None:
        """Waits for parameters that are still on their way from other ranks."""
        for chunk in self.trainer.chunks:
            all_arrived(chunk)

    def export_tensors(self, like: Checkpoint | None = None) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in Hugging Face names, in the trainer's precision or in `like`'s dtypes."""
        return self.weights.export_tensors(self._placement.whole(self.trainer.chunks), like=like)

    def export(self, directory: Path) -> None:
        """See `Policy`."""
        tensors = self.export_tensors(self._source if self._source.names else None)
        # A frozen tower as it is in the source, not as the trainer's precision rounds it.
        frozen = frozenset(self.kept.names)
        tensors = (
            (name, self._source.tensor(name) if name in frozen else tensor) for name, tensor in tensors
        )
        if self.world.rank == 0:
            write_checkpoint(directory, tensors, like=self._source)
        else:
            for _ in tensors:
                pass
        if self._lora is not None:
            adapters = dict(adapter_tensors(self._placement, self.trainer.chunks))
            if self.world.rank == 0:
                base = str(self._source.path)
                write_adapter(directory.with_name("adapter"), adapters, self._lora, base=base)

    def save_to(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        """See `Policy`."""
        self._writer = CheckpointWriter(root, self.trainer, keep=keep, asynchronous=asynchronous)
        # Whole before the policy's is begun, and kept as long: a checkpoint of the policy has its critic.
        self._critic_writer = (
            CheckpointWriter(root / CRITIC, self.critic, keep=keep + 1) if self.critic else None
        )

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Policy`."""
        with span("save", "trainer", step=step):
            if self._critic_writer is not None:
                self._critic_writer.save(step, {})
            self._writer.save(step, state)

    def finish_saves(self) -> None:
        """See `Policy`."""
        self._writer.finish()

    def load(self, directory: Path) -> dict[str, Any]:
        """See `Policy`."""
        if self.critic is not None:
            load_checkpoint(directory.parent / CRITIC / directory.name, self.critic)
        return load_checkpoint(directory, self.trainer)

    def chip(self) -> str:
        """See `Policy`."""
        return self.world.device.chip()

    def watch(self, folder: Path) -> None:
        """See `Policy`."""
        self._watch.open(folder)

    def begin_window(self, step: int) -> None:
        """See `Policy`."""
        self._watch.begin(step)

    def end_window(self) -> None:
        """See `Policy`."""
        self._watch.end()

    def spans(self) -> Sequence[ProcessSpans]:
        """None: what this process does is in its own timeline."""
        return ()


@contextmanager
def open_policy(
    config: RelaxConfig,
    source: Checkpoint,
    weights: ModelMap,
    *,
    store: Store | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[LocalPolicy]:
    """Takes the device and loads the model, or this rank's share of it; leaves the process as it was.

    Args:
        config: the run's.
        source, weights: the checkpoint to start from and its weight map, from `open_model`.
        store, timeout: where the ranks meet, and of their collectives; see `relax_core.device.initialise`.

    Raises:
        ValueError: the checkpoint does not fit, naming every tensor or setting that is wrong.
    """
    started = time.perf_counter()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    sizes = Qwen35Config.from_hf(source.config, vision=config.model.vision != "absent")
    world = initialise(
        choose_device(config.run.device),
        config.parallel,
        seed=config.run.seed % 2**31,
        deterministic=config.run.deterministic,
        store=store,
        timeout=timeout,
    )
    try:
        policy = _load(source, weights, sizes, config, world, mtp=config.mtp, lora=config.lora)
        lora = config.lora if config.lora.rank else None
        own = lora is not None and config.model.reference_path is None
        reference = (
            _load_reference(policy, sizes, config, world)
            if config.algorithm.needs_reference and not own
            else None
        )
        critic = (
            _load_critic(policy, sizes, config, world) if config.algorithm.algorithm.needs_critic else None
        )
        trainer = _make_trainer(policy, config.trainer, config.mtp, config, world)
        _log.info(
            "model %s on %s, %d parameters, ready after %.1f s",
            config.model.path,
            world.device.name,
            sum(p.numel() for chunk in policy for p in chunk.parameters()),
            time.perf_counter() - started,
        )
        teacher = _load_teacher(config.teacher.path, sizes, config, world) if config.teacher.path else None
        kept = KeptWeights(source, config.model)
        watch = Watch(config.run, world.device, world.rank, world.size)
        with closing(watch):
            yield LocalPolicy(
                world, source, weights, trainer, reference, critic, lora, teacher, kept=kept, watch=watch
            )
    finally:
        shutdown()


def _make_trainer(
    chunks: list[Qwen35Model], trainer: TrainerConfig, mtp: MtpConfig, config: RelaxConfig, world: World
) -> Trainer:
    return Trainer(
        chunks,
        trainer,
        mtp,
        device=world.torch_device,
        optimizer_steps=config.run.steps * config.trainer.optimizer_steps_per_batch,
        parallel=config.parallel,
    )


def _build(
    sizes: Qwen35Config,
    config: RelaxConfig,
    world: World,
    *,
    random_weights: bool,
    critic: bool = False,
    mtp: MtpConfig | None = None,
    lora: LoraConfig | None = None,
) -> list[Qwen35Model]:
    parallel: ParallelConfig = config.parallel
    return build_chunks(
        sizes,
        parallel,
        dtype=_DTYPES[config.trainer.precision],
        recompute=config.trainer.recompute,
        mtp=mtp,
        device=world.torch_device,
        random_weights=random_weights,
        critic=critic,
        lora=lora,
        seed=config.run.seed,
    )


def _load(
    source: Checkpoint,
    weights: ModelMap,
    sizes: Qwen35Config,
    config: RelaxConfig,
    world: World,
    *,
    mtp: MtpConfig | None = None,
    lora: LoraConfig | None = None,
) -> list[Qwen35Model]:
    chunks = _build(sizes, config, world, random_weights=not source.names, mtp=mtp, lora=lora)
    if source.names:
        Placement(weights).load(chunks, source)
    if config.model.vision == "frozen":
        freeze_tower(chunks)
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
        chunks, _ = _open(path, config, world)
    return _frozen(chunks)


def _load_teacher(path: str, sizes: Qwen35Config, config: RelaxConfig, world: World) -> list[Qwen35Model]:
    chunks, theirs = _open(path, config, world)
    if theirs.vocab_size != sizes.vocab_size:
        raise ValueError(
            f"teacher.path {path} has a vocabulary of {theirs.vocab_size} tokens, the policy one of "
            f"{sizes.vocab_size}: a teacher must read the same tokens"
        )
    return _frozen(chunks)


def _frozen(chunks: list[Qwen35Model]) -> list[Qwen35Model]:
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return chunks


def _load_critic(
    policy: Sequence[Qwen35Model], sizes: Qwen35Config, config: RelaxConfig, world: World
) -> Trainer:
    """The critic: the trunk of another checkpoint, or of the policy as it starts, under a head of zeros."""
    if config.critic.path is not None:
        policy, sizes = _open(config.critic.path, config, world)
    chunks = _build(sizes, config, world, random_weights=False, critic=True)
    copy_trunk(chunks, policy)
    if config.model.vision == "frozen":
        freeze_tower(chunks)
    lr = config.critic.lr
    settings = config.trainer.model_copy(update={"lr": lr, "min_lr": min(lr, config.trainer.min_lr)})
    return _make_trainer(chunks, settings, MtpConfig(), config, world)


def _open(path: str, config: RelaxConfig, world: World) -> tuple[list[Qwen35Model], Qwen35Config]:
    source = open_checkpoint(path)
    vision = config.model.vision != "absent"
    sizes = Qwen35Config.from_hf(source.config, vision=vision)
    weights = model_map(source.config, names=source.names, vision=vision)
    return _load(source, weights, sizes, config, world), sizes

"""What every loop needs before its first step: the device, the model with its weights, the tokenizer."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, ModelMap, adapt_mtp, model_map, write_checkpoint
from torch import Tensor

from relax_core.assets import locate
from relax_core.config.root import RelaxConfig
from relax_core.data import load_tokenizer
from relax_core.device import World, device_names, get_device, initialise, shutdown
from relax_core.model import Qwen35Config, Qwen35Model, build_model, named_weights
from relax_core.trainer.trainer import Trainer

_log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Session:
    """A trainer rank with its model loaded.

    Attributes:
        world: device and rank.
        source: the Hugging Face checkpoint the run starts from.
        weights: names and shapes between that checkpoint and the model.
        tokenizer: the checkpoint's own.
        trainer: the policy and its optimizer.
        reference: the frozen reference policy, if the algorithm needs one.
    """

    world: World
    source: Checkpoint
    weights: ModelMap
    tokenizer: Any
    trainer: Trainer
    reference: Qwen35Model | None

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights in Hugging Face names, in the trainer's precision."""
        return self.weights.export_tensors(_state(self.trainer.model))

    def export(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory in its source's dtypes, whole or not at all."""
        like = self.source if self.source.names else None
        tensors = self.weights.export_tensors(_state(self.trainer.model), like=like)
        write_checkpoint(directory, tensors, like=self.source)


@contextmanager
def open_session(config: RelaxConfig) -> Iterator[Session]:
    """Takes the device and loads the model; leaves the process as it was.

    Raises:
        ValueError: the checkpoint does not fit, naming every tensor or setting that is wrong.
    """
    started = time.perf_counter()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    source, weights = _open_model(config)
    sizes = Qwen35Config.from_hf(source.config)
    tokenizer = load_tokenizer(source.path)
    world = initialise(choose_device(config.run.device), seed=config.run.seed % 2**31)
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
        )
        _log.info(
            "model %s on %s, %d parameters, ready after %.1f s",
            config.model.path,
            world.device.name,
            sum(p.numel() for p in policy.parameters()),
            time.perf_counter() - started,
        )
        yield Session(world, source, weights, tokenizer, trainer, reference)
    finally:
        shutdown()


def _open_model(config: RelaxConfig) -> tuple[Checkpoint, ModelMap]:
    """The checkpoint to start from, with the draft layers that `config.mtp` asks for, and its weight map."""
    source = open_checkpoint(config.model.path, weights=not config.model.random_weights)
    std = Qwen35Config.from_hf(source.config).init_std
    weights = model_map(source.config, names=source.names or None, mtp_layers=config.mtp.layers)
    return adapt_mtp(source, weights, init=config.mtp.init, std=std, seed=config.run.seed), weights


def choose_device(wanted: str) -> str:
    """The device's name: `auto` takes npu, then cuda, then cpu."""
    if wanted != "auto":
        return wanted
    accelerators = (name for name in ("npu", "cuda") if name in device_names())
    return next((name for name in accelerators if get_device(name).available()), "cpu")


def open_checkpoint(path: str, *, weights: bool = True) -> Checkpoint:
    """A Hugging Face directory named by a setting.

    Raises:
        ValueError: there is none, or its files are broken.
    """
    directory = locate(path)
    if not directory.is_dir():
        raise ValueError(
            f"model.path is {path!r}: no such directory. Give a Hugging Face directory with config.json, "
            "safetensors and tokenizer; nothing is downloaded"
        )
    return Checkpoint.open(directory, weights=weights)


def _build(sizes: Qwen35Config, config: RelaxConfig, world: World, *, random_weights: bool) -> Qwen35Model:
    return build_model(
        sizes,
        dtype=_DTYPES[config.trainer.precision],
        recompute=config.trainer.recompute,
        mtp=config.mtp,
        device=world.torch_device,
        random_weights=random_weights,
    )


def _load(
    source: Checkpoint, weights: ModelMap, sizes: Qwen35Config, config: RelaxConfig, world: World
) -> Qwen35Model:
    model = _build(sizes, config, world, random_weights=not source.names)
    return _copy(weights.import_tensors(source), model) if source.names else model


def _load_reference(
    policy: Qwen35Model, sizes: Qwen35Config, config: RelaxConfig, world: World
) -> Qwen35Model:
    """The frozen reference: another checkpoint with a config of its own, or the policy as it starts."""
    path = config.model.reference_path
    if path is None:
        model = _copy(_state(policy).items(), _build(sizes, config, world, random_weights=False))
    else:
        source = open_checkpoint(path)
        weights = model_map(source.config, names=source.names)
        model = _load(source, weights, Qwen35Config.from_hf(source.config), config, world)
    model.requires_grad_(False)
    model.eval()
    return model


def _copy(tensors: Iterable[tuple[str, Tensor]], model: Qwen35Model) -> Qwen35Model:
    parameters = _state(model)
    for name, tensor in tensors:
        parameters[name].copy_(tensor)
    return model


def _state(model: Qwen35Model) -> dict[str, Tensor]:
    return dict(named_weights(model))

"""What a checkpoint holds of a trainer, in Megatron's sharded form."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from relax_core.model.linear import is_adapter
from relax_core.trainer.trainer import Trainer

GENERATORS = "generators"
_HOST_GENERATORS = "host_generators"
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def checkpoint_content(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything to save; `state` are the run loop's plain values."""
    return {
        **_tensors(trainer, is_loading=False),
        GENERATORS: _sharded_generators(),
        _HOST_GENERATORS: _host_generators(),
        "layout": trainer.ranks.plain(),
        "loop": dict(state),
        "scheduler": trainer.training.scheduler.state_dict(),
    }


def loadable_content(trainer: Trainer, directory: Path, added: Sequence[str]) -> dict[str, Any]:
    """What to ask of the checkpoint in `directory`; a rank's own generators only in the layout that wrote it.

    In another layout all ranks take the host's generators, which are alike on all ranks, and the device's and
    Megatron's stay as `run.seed` made them. Only the dropout of adapters draws from them while training, and
    no two layouts drop the same.

    Args:
        trainer: to be restored.
        directory: of the checkpoint.
        added: beginnings of weights' names that are not asked for where the checkpoint has none of them.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    absent = [start for start in added if not any(key.startswith(start) for key in stored)]
    content: dict[str, Any] = _without(_tensors(trainer, is_loading=True), absent)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if common.get("layout") == trainer.ranks.plain():
        content[GENERATORS] = _sharded_generators()
    return content


def compare_names(content: Any, directory: Path) -> tuple[list[str], list[str]]:
    """Names of tensors, over all ranks, that only the trainer has, and that only the checkpoint has."""
    asked: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(asked, set(_names(content)))
    wanted = set().union(*asked)
    stored = set(dist_checkpointing.load_tensors_metadata(str(directory)))
    return sorted(wanted - stored), sorted(stored - wanted)


def _names(content: Any) -> Iterator[str]:
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _names(value)
    elif isinstance(content, ShardedTensorFactory):
        yield from _names(content.build())
    elif isinstance(content, ShardedTensor):
        yield content.key


def restore_content(trainer: Trainer, loaded: Mapping[str, Any], *, complete: bool) -> None:
    """Puts what was loaded into the trainer.

    Args:
        trainer: gets it.
        loaded: what the checkpoint gave of `loadable_content`.
        complete: whether some weights were not in the checkpoint; they keep what they are.
    """
    if complete:
        fresh = _tensors(trainer, is_loading=False)
        loaded = {**loaded, **{name: _completed(loaded.get(name), part) for name, part in fresh.items()}}
    for name, chunk in _named_chunks(trainer).items():
        _, unexpected = chunk.load_state_dict(loaded[name], strict=chunk.config.lora is None)
        assert not unexpected, f"the checkpoint holds what the model has not: {unexpected}"
    trainer.training.optimizer.load_state_dict(loaded["optimizer"])
    trainer.training.scheduler.load_state_dict(loaded["scheduler"])
    if GENERATORS in loaded:
        _restore_generators(loaded[GENERATORS])
    elif _HOST_GENERATORS in loaded:
        _restore_host_generators(loaded[_HOST_GENERATORS])


def _tensors(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    model = {name: _weights(chunk) for name, chunk in _named_chunks(trainer).items()}
    optimizer = trainer.training.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=_OPTIMIZER_FORMAT
    )
    return {**model, "optimizer": optimizer}


def _weights(chunk: Any) -> dict[str, Any]:
    """What is trained: with adapters, they alone; the rest is read from where the run starts."""
    state: dict[str, Any] = chunk.sharded_state_dict()
    if chunk.config.lora is None:
        return state
    return {name: value for name, value in state.items() if is_adapter(name)}


def _named_chunks(trainer: Trainer) -> dict[str, Any]:
    if len(trainer.chunks) == 1:
        return {"model": trainer.chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(trainer.chunks)}


def _without(content: Any, starts: Sequence[str]) -> Any:
    """Leaves out weights whose names begin with one of `starts`, and their optimizer states."""
    if not isinstance(content, dict):
        return content
    return {
        key: _without(value, starts)
        for key, value in content.items()
        if not any(f".{start}" in f".{getattr(value, 'key', '')}" for start in starts)
    }


def _completed(loaded: Any, fresh: Any) -> Any:
    """`loaded` with the tensors of `fresh`, a sharded form of the same, where it has none."""
    if isinstance(fresh, dict) and (loaded is None or isinstance(loaded, dict)):
        loaded = loaded or {}
        return loaded | {key: _completed(loaded.get(key), value) for key, value in fresh.items()}
    if loaded is not None:
        return loaded
    return getattr(fresh, "data", fresh)


def _sharded_generators() -> ShardedObject:
    """The states of all generators of this rank, kept per pipeline and tensor rank of each replica."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {**_host_generators(), "tracked": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(
        GENERATORS,
        state,
        (pipeline.size(), tensor.size(), replicas.size()),
        (pipeline.rank(), tensor.rank(), replicas.rank()),
    )


def _host_generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def _restore_host_generators(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def _restore_generators(state: Mapping[str, Any]) -> None:
    _restore_host_generators(state)
    get_cuda_rng_tracker().set_states(state["tracked"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

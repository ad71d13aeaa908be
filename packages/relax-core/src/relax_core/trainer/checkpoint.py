"""Checkpoints of a trainer: whole or not there, verified before they are read.

A directory `step_<n>` holds Megatron's torch_dist format (any layout can read it), `common.pt` with the plain
values, and `manifest.json` with the size and SHA-256 of every file. It is written beside its final name and
renamed once everything is on disk, so a name that exists is a checkpoint that is complete.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from relax_core.run.files import sync_folder, writing
from relax_core.trainer.disk_errors import disk_errors
from relax_core.trainer.save_strategy import TorchDistWriter
from relax_core.trainer.trainer import Trainer

_NAME = re.compile(r"step_(\d+)")
_MANIFEST = "manifest.json"
_NEEDED = ("common.pt", "metadata.json", ".metadata")
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the text says what to do."""


def save_checkpoint(root: Path, step: int, trainer: Trainer, state: Mapping[str, Any], *, keep: int) -> Path:
    """Writes `root/step_<step>` on all ranks and deletes all but the newest `keep` checkpoints.

    Args:
        root: directory of the run's checkpoints.
        step: steps finished; an existing checkpoint of the same step is replaced.
        trainer: model, optimizer and schedule to save.
        state: plain values of the run loop that come back from `load_checkpoint`.
        keep: checkpoints left behind, this one included.

    Raises:
        RunDirectoryError: the disk is full or not writable; the checkpoints there are stay whole.
    """
    final = root / f"step_{step}"
    partial = root / f".step_{step}.partial"
    first = dist.get_rank() == 0
    if first:
        with writing(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    dist.barrier()
    content = _sharded_state(trainer, is_loading=False)
    content["loop"] = dict(state)
    content["scheduler"] = trainer.training.scheduler.state_dict()
    try:
        with writing(final), disk_errors():
            dist_checkpointing.save(content, str(partial), TorchDistWriter())
            dist.barrier()
            if first:
                _seal(partial)
    except BaseException:
        # What a full disk needs is room.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if first:
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_folder(root)
        tidy_checkpoints(root, keep=keep)
    dist.barrier()
    return final


def tidy_checkpoints(root: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and what a killed process had begun to write."""
    for old in (*list_checkpoints(root)[:-keep], *root.glob(".step_*.partial")):
        shutil.rmtree(old)


def load_checkpoint(directory: Path, trainer: Trainer) -> dict[str, Any]:
    """Restores model, optimizer and schedule; returns the run loop's `state`.

    Raises:
        CheckpointError: a file is missing, cut or altered, or the checkpoint holds other parameters.
    """
    verify_checkpoint(directory)
    content = _sharded_state(trainer, is_loading=True)
    loaded, missing, unexpected = dist_checkpointing.load(
        content, str(directory), strict=StrictHandling.RETURN_ALL
    )
    if missing or unexpected:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: missing {_some(missing)}; extra "
            f"{_some(unexpected)}. Resume with the config that wrote it."
        )
    trainer.model.load_state_dict(loaded["model"])
    trainer.training.optimizer.load_state_dict(loaded["optimizer"])
    trainer.training.scheduler.load_state_dict(loaded["scheduler"])
    state: dict[str, Any] = loaded["loop"]
    return state


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def verify_checkpoint(directory: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: naming each file that differs.
    """
    manifest = _read_manifest(directory)
    wrong = [
        f"{name} is not in {_MANIFEST}"
        for name in (*_NEEDED, *sorted(path.name for path in directory.glob("*.distcp")))
        if name not in manifest
    ]
    for name, (size, digest) in manifest.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _digest(path) != digest:
            wrong.append(f"{name} has other content than was written")
    if wrong:
        raise CheckpointError(f"checkpoint {directory} is damaged: {'; '.join(wrong)}. {_ADVICE}")


def _read_manifest(directory: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file by its name."""
    try:
        content = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        return {name: (entry["bytes"], entry["sha256"]) for name, entry in content.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {directory} has no readable {_MANIFEST} ({reason}). {_ADVICE}"
        ) from error


def _some(names: Iterable[str], shown: int = 5) -> str:
    every = sorted(names)
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return (", ".join(every[:shown]) or "nothing") + more


_ADVICE = "Move it away to resume from the checkpoint before it."


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    model = trainer.model.sharded_state_dict()
    optimizer = trainer.training.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=_OPTIMIZER_FORMAT
    )
    return {"model": model, "optimizer": optimizer}


def _seal(directory: Path) -> None:
    manifest = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        manifest[path.relative_to(directory).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
        }
        with path.open("rb") as file:
            os.fsync(file.fileno())
    with (directory / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(directory)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

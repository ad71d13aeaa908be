"""Checkpoints of a trainer: whole or not there, verified before they are read.

A directory `step_<n>` holds Megatron's torch_dist format (any layout can read it), `common.pt` with the plain
values, and `manifest.json` with the size and SHA-256 of every file. It is written beside its final name and
renamed once everything is on disk, so a name that exists is a checkpoint that is complete.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from relax_core.run.files import sync_folder, writing
from relax_core.trainer.checkpoint_content import (
    checkpoint_content,
    compare_names,
    loadable_content,
    restore_content,
)
from relax_core.trainer.disk_errors import disk_errors
from relax_core.trainer.folders import tidy_checkpoints
from relax_core.trainer.save_strategy import TorchDistWriter
from relax_core.trainer.trainer import Trainer

_MANIFEST = "manifest.json"
_NEEDED = ("common.pt", "metadata.json", ".metadata")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the text says what to do."""


def save_checkpoint(root: Path, step: int, trainer: Trainer, state: Mapping[str, Any], *, keep: int) -> Path:
    """Writes `root/step_<step>` on all ranks and deletes all but the newest `keep` checkpoints.

    See `CheckpointWriter`.
    """
    writer = CheckpointWriter(root, trainer, keep=keep)
    writer.save(step, state)
    return root / f"step_{step}"


class CheckpointWriter:
    """Writes the checkpoints of one run, at once or behind its back; all ranks must call it alike.

    Args:
        root: directory of the run's checkpoints, the same one on every rank.
        trainer: model, optimizer, schedule and generators to save.
        keep: checkpoints left behind, the newest included.
        asynchronous: `save` returns once the state was copied to the host, and a thread writes it. At most
            one checkpoint is being written; the one before it counts until the new one is whole.
    """

    def __init__(self, root: Path, trainer: Trainer, *, keep: int, asynchronous: bool = False) -> None:
        self._root = root
        self._trainer = trainer
        self._keep = keep
        self._asynchronous = asynchronous
        # Ranks talk of the plan while training communicates: over a group of their own.
        self._group = dist.new_group(backend="gloo") if asynchronous else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves the present state as `step_<step>`, in place of an existing one; waits for the one before.

        Args:
            step: steps finished.
            state: plain values of the run loop, the same on every rank, that come back from
                `load_checkpoint`.

        Raises:
            RunDirectoryError: the disk is full or not writable (of the save before, if that was
                asynchronous); the checkpoints there are stay whole.
        """
        self.finish()
        partial = self._root / f".step_{step}.partial"
        if dist.get_rank() == 0:
            with writing(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        dist.barrier()
        writer = TorchDistWriter(later=True, copy=self._asynchronous)
        with _discarded(partial), writing(self._root / f"step_{step}"), disk_errors():
            dist_checkpointing.save(checkpoint_content(self._trainer, state), str(partial), writer)
        if not self._asynchronous:
            self._write(writer, partial, step)
            return
        self._thread = threading.Thread(
            target=self._write_behind, args=(writer, partial, step), name=f"checkpoint of step {step}"
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits for a checkpoint that is being written.

        Raises:
            RunDirectoryError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_behind(self, writer: TorchDistWriter, partial: Path, step: int) -> None:
        try:
            self._write(writer, partial, step)
        except BaseException as error:
            self._failure = error

    def _write(self, writer: TorchDistWriter, partial: Path, step: int) -> None:
        final = self._root / f"step_{step}"
        with _discarded(partial), writing(final), disk_errors():
            writer.write(self._group)
            dist.barrier(group=self._group)
            if dist.get_rank() == 0:
                _seal(partial)
        if dist.get_rank() == 0:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync_folder(self._root)
            tidy_checkpoints(self._root, keep=self._keep)
        dist.barrier(group=self._group)


@contextmanager
def _discarded(partial: Path) -> Iterator[None]:
    """What is half written goes if the block fails: what a full disk needs is room."""
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(directory: Path, trainer: Trainer, *, added: Sequence[str] = ()) -> dict[str, Any]:
    """Restores model, optimizer, schedule and generators on all ranks; returns the run loop's `state`.

    The checkpoint may be of any layout. Generators are restored where it is the same, and stay as they are in
    another.

    Args:
        directory: `step_<n>`, the same one on every rank.
        trainer: whose state is replaced.
        added: beginnings of names that the checkpoint need not have, for instance "mtp.layers.1.": these
            weights keep what they are, and their optimizer state is fresh.

    Raises:
        CheckpointError: a file is missing, cut or altered, or the checkpoint holds other parameters.
    """
    _verify_together(directory)
    content = loadable_content(trainer, directory, added)
    missing, extra = compare_names(content, directory)
    if missing or extra:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: missing {_some(missing)}; extra {_some(extra)}. "
            "Resume with the config that wrote it."
        )
    loaded = dist_checkpointing.load(content, str(directory))
    restore_content(trainer, loaded, complete=bool(added))
    state: dict[str, Any] = loaded["loop"]
    return state


def _verify_together(directory: Path) -> None:
    """Rank 0 reads every file once; all ranks raise what it found."""
    found: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            verify_checkpoint(directory)
        except CheckpointError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        raise found[0]


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

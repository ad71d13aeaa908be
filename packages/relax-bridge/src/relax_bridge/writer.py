"""Writes a checkpoint directory in one step: whole and new, or not at all.

Everything goes to a hidden folder beside the target, is flushed to the disk, and takes the target's name at
the end; whatever fails before leaves the previous directory as it was. A writer that is killed leaves its
hidden folder behind, which the next one to write there removes.
"""

import ctypes
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from relax_bridge.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint
from relax_bridge.errors import CheckpointError, CoverageError, Problems
from relax_bridge.safetensors_writer import SafetensorsFile, Spec, spec

# Copied byte for byte if the source has them; a model card is not, as it speaks of the source's weights.
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "LICENSE*",
)
_WEIGHTS = ("*.safetensors", INDEX)
# A younger folder may belong to a writer that has yet to lock it.
_ABANDONED_S = 60


def write_checkpoint(
    out_dir: str | Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    like: Checkpoint,
    max_shard_bytes: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a Hugging Face checkpoint directory atomically.

    Args:
        out_dir: the directory to make; an earlier checkpoint there is replaced at the very end.
        tensors: Hugging Face names and tensors, in any order, for instance from `ModelMap.export_tensors`.
        like: the checkpoint whose config, generation config, tokenizer and chat template are copied byte for
            byte. If it has weights, `tensors` must be exactly its names and shapes, and each is written in
            its source dtype.
        max_shard_bytes: the size of a weight file at most (a larger single tensor has a file to itself);
            by default the files of `like`, or one file if it has no weights.
        config: written as `config.json` in place of the copied one; by default that of `like` if it was
            changed.

    Returns:
        `out_dir` as a path.

    Raises:
        CoverageError: names what is missing, extra, repeated or mis-shaped against `like`.
        CheckpointError: `out_dir` holds something that is not a checkpoint, or a dtype is not writable.
        OSError: the disk's own error (full, read-only); the previous directory is whole.
    """
    target = Path(os.path.realpath(out_dir))
    check_replaceable(target, (*COMPANIONS, *_WEIGHTS))
    quantised = [f"{n}: {like.stored_dtype(n)}" for n in like.names if like.dtype(n) is None]
    if quantised:
        raise CoverageError(f"{like.path} cannot be written back", Problems(unsupported=tuple(quantised)))
    stream = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if like.names:
        stream = _as_source(stream, like)
    with replaced_directory(target) as work:
        if like.names and max_shard_bytes is None:
            _write_like(work, stream, like)
        else:
            _write_greedy(work, stream, like, max_shard_bytes)
        _copy_companions(like.path, work)
        if config is None and like.config_changed:
            config = like.config
        if config is not None:
            _write_json(work / CONFIG, config)
    return Path(out_dir)


@contextmanager
def replaced_directory(out_dir: Path) -> Iterator[Path]:
    """A new folder that takes the name `out_dir` when the block ends well, and vanishes otherwise."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out_dir)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.new-", dir=out_dir.parent))
    handle = os.open(work, os.O_RDONLY)
    try:
        _lock(handle)
        yield work
        work.chmod(0o755)
        for path in (*work.rglob("*"), work):
            _sync(path)
        _swap(work, out_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


def _remove_abandoned(out_dir: Path) -> None:
    """Removes the folders that killed writers left; a writer at work holds the lock of its own."""
    for path in out_dir.parent.glob(f".{glob.escape(out_dir.name)}.new-*"):
        try:
            if time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue
            handle = os.open(path, os.O_RDONLY)
        except OSError:  # another user's, or gone in the meantime
            continue
        try:
            if _lock(handle):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Locks an open directory, if nobody has; it is free again when closed or when the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return False
    return True


def _swap(work: Path, out_dir: Path) -> None:
    if not out_dir.exists():
        work.rename(out_dir)
    elif not _exchange(work, out_dir):
        old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old-", dir=out_dir.parent))
        out_dir.rename(old)
        try:
            work.rename(out_dir)
        except OSError:
            old.rename(out_dir)
            raise
        shutil.rmtree(old)
    _sync(out_dir.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two directories in one step where the system can (Linux), so that no moment is without either."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    done: int = renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    return done == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_source(tensors: Iterator[tuple[str, Tensor]], like: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    wrong: dict[str, list[str]] = {"missing": [], "extra": [], "mis_shaped": []}
    for name, tensor in tensors:
        if name not in like or name in seen:
            wrong["extra"].append(name if name not in like else f"{name}: given twice")
        elif tuple(tensor.shape) != like.shape(name):
            wrong["mis_shaped"].append(f"{name}: {list(tensor.shape)}, source {list(like.shape(name))}")
        else:
            yield name, tensor.to(like.dtype(name))
        seen.add(name)
    wrong["missing"] = [name for name in like.names if name not in seen]
    problems = Problems(**{kind: tuple(names) for kind, names in wrong.items()})
    if problems:
        raise CoverageError(
            f"tensors to write are not those of {like.path}",
            problems,
            "Tensors the trainer does not hold are carried by ModelMap.export_tensors(..., like=source).",
        )


def _write_like(work: Path, tensors: Iterator[tuple[str, Tensor]], like: Checkpoint) -> None:
    plans: dict[str, dict[str, Spec]] = {file: {} for file in like.files}
    for name in like.names:
        size = like.nbytes(name)
        plans[like.file(name)][name] = Spec(like.shape(name), like.stored_dtype(name), size)
    plans = {file: plan for file, plan in plans.items() if plan}
    open_files: dict[str, SafetensorsFile] = {}
    try:
        for file, plan in plans.items():
            open_files[file] = SafetensorsFile(work / file, plan, like.metadata(file))
        for name, tensor in tensors:
            open_files[like.file(name)].put(name, tensor)
        for handle in open_files.values():
            handle.close()
    finally:
        for handle in open_files.values():
            handle.abandon()
    if like.index_metadata is not None:
        _write_index(work, plans, like.index_metadata)


def _write_greedy(
    work: Path, tensors: Iterator[tuple[str, Tensor]], like: Checkpoint, limit: int | None
) -> None:
    shards: list[dict[str, Spec]] = []
    batch: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        plan = {name: spec(tensor) for name, tensor in batch.items()}
        shard = SafetensorsFile(work / f"shard-{len(shards)}", plan, {"format": "pt"})
        try:
            for name, tensor in batch.items():
                shard.put(name, tensor)
            shard.close()
        finally:
            shard.abandon()
        shards.append(plan)
        batch.clear()
        size = 0

    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise CoverageError("tensors to write", Problems(extra=(f"{name}: given twice",)))
        seen.add(name)
        item = spec(tensor)
        if limit is not None and batch and size + item.size > limit:
            flush()
        batch[name] = tensor
        size += item.size
    if batch:
        flush()
    if not shards:
        raise CheckpointError("no tensors to write")
    if len(shards) == 1:
        (work / "shard-0").rename(work / SINGLE)
        return
    plans = {}
    for i, plan in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (work / f"shard-{i}").rename(work / file)
        plans[file] = plan
    _write_index(work, plans, like.index_metadata or {})


def _write_index(work: Path, plans: Mapping[str, Mapping[str, Spec]], metadata: Mapping[str, Any]) -> None:
    items = [item for plan in plans.values() for item in plan.values()]
    exact: dict[str, Any] = {**metadata, "total_size": sum(item.size for item in items)}
    if "total_parameters" in exact:
        exact["total_parameters"] = sum(prod(item.shape) for item in items)
    weight_map = {name: file for file, plan in plans.items() for name in plan}
    _write_json(work / INDEX, {"metadata": exact, "weight_map": dict(sorted(weight_map.items()))})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_companions(source: Path, work: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, work / path.name)


def check_replaceable(out_dir: Path, known: tuple[str, ...]) -> None:
    """Refuses to replace what is not a checkpoint: a file, or a directory that holds other names than
    `known`.

    Raises:
        CheckpointError: naming what it holds.
    """
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise CheckpointError(f"{out_dir} is a file")
    strange = [p.name for p in out_dir.iterdir() if not any(p.match(pattern) for pattern in known)]
    if strange:
        raise CheckpointError(
            f"{out_dir} would be replaced, but holds {', '.join(sorted(strange)[:10])}, which no checkpoint "
            "has; choose another directory"
        )

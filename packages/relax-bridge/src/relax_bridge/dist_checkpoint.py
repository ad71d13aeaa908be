"""Megatron's distributed checkpoints (format `torch_dist`) without Megatron: any layout wrote them, any reads
them.

The format is torch.distributed.checkpoint's, beside which `metadata.json` names it and `common.pt` holds
plain values.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from relax_bridge.checkpoint import Checkpoint, read_json
from relax_bridge.dist_keys import STATE, STATE_SUFFIXES, StoredKey, stored_keys
from relax_bridge.errors import CheckpointError, CoverageError, Problems
from relax_bridge.model_map import ModelMap
from relax_bridge.partition import Cut
from relax_bridge.placement import pieces_of
from relax_bridge.sharded_import import read_pieces
from relax_bridge.writer import check_replaceable, replaced_directory

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_NAMES = ("*.distcp", ".metadata", "metadata.json", "common.pt", "manifest.json")
# What unpickling bytes that are not a whole pickle raises.
_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
Report = Callable[[int, int], None]


class DistCheckpoint:
    """A directory that Megatron's `dist_checkpointing` wrote; opening reads only its metadata.

    Its `.metadata` is a Python pickle, as Megatron's own reader takes it: open only files that you trust.
    """

    def __init__(self, path: Path, reader: Any, metadata: Any) -> None:
        """Use `DistCheckpoint.open`."""
        self.path = path
        self._reader = reader
        self._metadata = metadata
        self.shapes: dict[str, tuple[int, ...]] = {
            key: tuple(item.size)
            for key, item in metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }

    @classmethod
    def open(cls, path: str | Path) -> "DistCheckpoint":
        """Opens a directory.

        Raises:
            CheckpointError: it is not there, or of another format.
        """
        path = Path(path)
        found = read_json(path / "metadata.json").get("sharded_backend")
        if found != "torch_dist":
            raise CheckpointError(f"{path} has the format {found!r}; only 'torch_dist' is known")
        if not (path / ".metadata").is_file():
            raise CheckpointError(f"{path} has no .metadata: it was not written to its end")
        reader = FileSystemReader(path)
        try:
            metadata = reader.read_metadata()
        except _BROKEN_PICKLE as error:
            raise CheckpointError(f"{path / '.metadata'} is damaged: {error}") from error
        return cls(path, reader, metadata)

    @property
    def weights(self) -> list[str]:
        """The keys that are not optimizer or random state."""
        return [key for key in self.shapes if not key.startswith(STATE) and not key.endswith(STATE_SUFFIXES)]

    @property
    def mtp_layers(self) -> int:
        """The number of MTP layers its keys speak of."""
        layers = {key.split(".")[2] for key in self.shapes if key.startswith("mtp.layers.")}
        return len(layers)

    def tensor(self, key: str) -> Tensor:
        """Reads a whole tensor from the pieces that ranks wrote.

        Raises:
            CheckpointError: a file is missing or cut short.
        """
        item = self._metadata.state_dict_metadata[key]
        out = {key: torch.empty(item.size, dtype=item.properties.dtype)}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(out, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, *_BROKEN_PICKLE) as error:
            raise CheckpointError(f"{self.path}: cannot read {key}: {error}") from error
        return out[key]

    def check(self, table: ModelMap) -> None:
        """Refuses a checkpoint whose weights are not exactly those of a table.

        Raises:
            CoverageError: names every key that is missing, extra or mis-shaped.
        """
        wanted = {stored.key: stored for group in stored_keys(table) for stored in group}
        problems = Problems(
            missing=tuple(key for key in wanted if key not in self.shapes),
            extra=tuple(key for key in self.weights if key not in wanted),
            mis_shaped=tuple(
                f"{key}: {list(self.shapes[key])}, the table says {list(stored.shape)}"
                for key, stored in wanted.items()
                if key in self.shapes and not _fits(self.shapes[key], stored)
            ),
        )
        if problems:
            raise CoverageError(f"{self.path} does not fit the {table.model} table", problems)

    def megatron_tensors(self, table: ModelMap) -> Iterator[tuple[str, Tensor]]:
        """Megatron name and full tensor, in the order of the table; one stored tensor in memory at a time.

        Raises:
            CoverageError: see `check`; before the first tensor is read.
        """
        self.check(table)
        return self._read(table)

    def _read(self, table: ModelMap) -> Iterator[tuple[str, Tensor]]:
        for group in stored_keys(table):
            parts = [self.tensor(stored.key) for stored in group]
            stacked = len(group[0].shape) > len(group[0].entries[0].megatron_shape)
            axis = 1 if stacked else 0
            parts = [x.narrow(axis, 0, stored.rows.size) for x, stored in zip(parts, group, strict=True)]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
            del parts
            for place, entry in enumerate(group[0].entries):
                yield entry.megatron, whole[place] if stacked else whole


def write_dist_checkpoint(
    out_dir: str | Path, table: ModelMap, checkpoint: Checkpoint, *, report: Report | None = None
) -> Path:
    """Writes a model's weights as a distributed checkpoint, whole or not at all.

    Each tensor is read when it is written, in its stored dtype. Megatron cuts what it loads by its own
    layout, so the layout that will read it need not be known.

    Args:
        out_dir: the directory; an earlier distributed checkpoint there is replaced at the very end.
        table: the model's map.
        checkpoint: the Hugging Face checkpoint.
        report: called with (bytes written, bytes in all) after each tensor.

    Raises:
        MtpMismatchError, CoverageError: the checkpoint is not exactly this model.
        CheckpointError: `out_dir` holds something else.
        OSError: the disk's own error; the previous directory is whole.
    """
    table.check(checkpoint)
    target = Path(os.path.realpath(out_dir))
    check_replaceable(target, _NAMES)
    keys = [stored for group in stored_keys(table) for stored in group]
    with replaced_directory(target) as work:
        try:
            _write(work, checkpoint, keys, report or (lambda done, total: None))
            torch.save({}, work / "common.pt")
        except RuntimeError as error:
            # Closing its archive, torch fails once more over what a write has raised (a full disk).
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        (work / "metadata.json").write_text(json.dumps(_FORMAT))
    return Path(out_dir)


def _write(work: Path, checkpoint: Checkpoint, keys: Iterable[StoredKey], report: Report) -> None:
    """The steps of torch.distributed.checkpoint.save for one process that needs no process group."""
    stored = {one.key: one for one in keys}
    planner = _LazyPlanner(checkpoint, stored, report)
    shapes = {
        key: torch.empty(one.shape, dtype=checkpoint.dtype(one.entries[0].hf[0]), device="meta")
        for key, one in stored.items()
    }
    writer = FileSystemWriter(work, single_file_per_rank=True, sync_files=False, thread_count=1)
    planner.set_up_planner(shapes, None, True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


class _LazyPlanner(DefaultSavePlanner):
    """Plans from shapes and reads each tensor only when its turn to be written comes."""

    def __init__(self, checkpoint: Checkpoint, stored: dict[str, StoredKey], report: Report) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._checkpoint = checkpoint
        self._stored = stored
        self._report = report
        self._done = 0
        self._total = sum(checkpoint.nbytes(name) for name in _names(stored.values()))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor of a key, from the Hugging Face checkpoint."""
        stored = self._stored[index.fqn]
        row = stored.entries[0].row
        pieces = pieces_of(row.transform.runs(row.part_shapes), Cut((stored.rows,)))
        out = torch.empty(stored.shape, dtype=self._checkpoint.dtype(stored.entries[0].hf[0]))
        stacked = out.dim() > len(row.megatron_shape)
        for place, entry in enumerate(stored.entries):
            read_pieces(self._checkpoint, entry, 0, pieces, out[place] if stacked else out)
        self._done += out.nbytes
        self._report(self._done, self._total)
        return out


def _names(stored: Iterable[StoredKey]) -> set[str]:
    return {name for one in stored for entry in one.entries for name in entry.hf}


def _fits(shape: tuple[int, ...], stored: StoredKey) -> bool:
    if stored.padded:
        return shape[1:] == stored.shape[1:] and shape[0] >= stored.shape[0]
    return shape == stored.shape

"""Reads a Hugging Face checkpoint directory lazily: names and shapes at once, bytes when asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax_bridge.errors import CheckpointError
from relax_bridge.raw_file import RawFile

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_BITS = {word: 8 * dtype.itemsize for word, dtype in DTYPES.items()}
_BITS |= {
    "I64": 64,
    "U64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and what it is; `dtype` is safetensors' word, for instance `BF16`."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """A directory of `config.json` and safetensors files.

    Opening reads only the headers (and so finds a file that was cut short); tensors are read from the mapped
    files one by one, or slice by slice.

    Attributes:
        path: the directory.
        config: its parsed `config.json`.
        config_changed: whether `config` is another than the file's (see `relax_bridge.mtp.adapt_mtp`).
        index_metadata: the metadata of its index; None without one.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], files: Mapping[str, Any], index: Any) -> None:
        """Use `Checkpoint.open`."""
        self.path = path
        self.config = config
        self.index_metadata: dict[str, Any] | None = index
        self.config_changed = False
        self._files = files
        self._raw_files: dict[str, RawFile] = {}
        self._stored = {
            name: Stored(file, tuple(view.get_shape()), view.get_dtype())
            for file, handle in files.items()
            for name in handle.offset_keys()
            for view in (handle.get_slice(name),)
        }

    @classmethod
    def open(cls, path: str | Path, *, weights: bool = True) -> "Checkpoint":
        """Opens a directory.

        Args:
            path: the directory.
            weights: False for a directory of config and tokenizer alone (to start a new model from).

        Raises:
            CheckpointError: no such directory, no config, no or other weights than safetensors, a file that
                the index names and is not there, a file cut short, or an index that does not fit the files.
        """
        path = Path(path)
        config = read_json(path / CONFIG)
        if not weights:
            return cls(path, config, {}, None)
        if (path / INDEX).is_file():
            index = read_json(path / INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{path / INDEX}: no weight_map")
            if strange := sorted({repr(file) for file in weight_map.values() if not _is_plain(file)}):
                raise CheckpointError(
                    f"{path / INDEX}: weight_map names {', '.join(strange)}; each must be the plain name of "
                    "a file in this directory"
                )
            files = {file: _open_file(path / file) for file in sorted(set(weight_map.values()))}
            _check_index(path, weight_map, files)
            if not isinstance(index.get("metadata"), dict):
                raise CheckpointError(
                    f"{path / INDEX}: no metadata, without which transformers reads no index; add "
                    '"metadata": {}'
                )
            return cls(path, config, files, dict(index["metadata"]))
        if not (path / SINGLE).is_file():
            others = sorted(f.name for f in path.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".gguf"})
            seen = f"; found {', '.join(others)}, convert to safetensors first" if others else ""
            raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}{seen}")
        return cls(path, config, {SINGLE: _open_file(path / SINGLE)}, None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All tensor names, in the order of the files and of the bytes in them."""
        return tuple(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    @property
    def files(self) -> tuple[str, ...]:
        """The weight files' names, in order."""
        return tuple(self._files)

    def metadata(self, file: str) -> dict[str, str]:
        """The free-form metadata in the header of a weight file."""
        return dict(self._files[file].metadata() or {})

    def file(self, name: str) -> str:
        """The weight file that holds a tensor."""
        return self._at(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._at(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor; None if it is not a plain float (quantised, see `stored_dtype`)."""
        return DTYPES.get(self._at(name).dtype)

    def stored_dtype(self, name: str) -> str:
        """The dtype word in the file, for instance `BF16` or `F8_E4M3`."""
        return self._at(name).dtype

    def nbytes(self, name: str) -> int:
        """The size of a tensor in the file, in bytes; that of the elements alone for dtypes of less than
        one."""
        at = self._at(name)
        return prod(at.shape) * _BITS.get(at.dtype, 8) // 8

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor."""
        tensor: Tensor = self._files[self._at(name).file].get_tensor(name)
        return tensor

    def slice(self, name: str, *index: slice) -> Tensor:
        """Reads a part of a tensor, one slice an axis; only the bytes of the part are touched."""
        part: Tensor = self._files[self._at(name).file].get_slice(name)[index]
        return part

    def read_into(
        self, out: Tensor, name: str, *, row: int = 0, column: int | None = None, stack: int | None = None
    ) -> None:
        """Fills `out` with a window of a tensor; only the bytes of the window are read.

        Args:
            out: on the CPU, of the stored dtype; contiguous unless `column` is given.
            name: the tensor, [R, ...] or with `stack` [E, R, ...].
            row: the window's first row.
            column: the window's first column, for tensors [R, C]; None takes whole rows.
            stack: the position along a leading axis E.
        """
        at = self._at(name)
        shape = at.shape if stack is None else at.shape[1:]
        width = prod(shape[1:])
        skip = ((stack or 0) * shape[0] + row) * width
        file = self._raw(at.file)
        if column is None:
            file.read_into(out, name, skip)
        else:
            file.read_columns_into(out, name, skip + column, width)

    def _raw(self, file: str) -> RawFile:
        if file not in self._raw_files:
            self._raw_files[file] = RawFile(self.path / file)
        return self._raw_files[file]

    def _at(self, name: str) -> Stored:
        if name not in self._stored:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._stored[name]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; `CheckpointError` names the file if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _is_plain(file: object) -> bool:
    """Whether it names a file of the directory itself: what is written like it goes to that name."""
    return isinstance(file, str) and file not in {"", ".."} and Path(file).name == file


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"the index names {path}, which is not there") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _check_index(path: Path, weight_map: Mapping[str, str], files: Mapping[str, Any]) -> None:
    held = {(name, file) for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118
    listed = set(weight_map.items())
    wrong = [f"{n} is listed for {f}, which does not hold it" for n, f in sorted(listed - held)]
    wrong += [f"{n} is in {f} and not listed for it" for n, f in sorted(held - listed)]
    if wrong:
        raise CheckpointError(f"{path / INDEX} does not fit its files:\n  " + "\n  ".join(wrong[:40]))

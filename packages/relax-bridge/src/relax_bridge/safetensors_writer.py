"""Writes a safetensors file whose tensors arrive in any order: header first, then each at its offset.

Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON, data).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_bridge.checkpoint import DTYPES
from relax_bridge.errors import CheckpointError

WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What a file will hold under a name; `dtype` is safetensors' word, `size` in bytes."""

    shape: tuple[int, ...]
    dtype: str
    size: int


def spec(tensor: Tensor) -> Spec:
    """The spec of a tensor in memory.

    Raises:
        CheckpointError: a dtype the bridge does not write.
    """
    if tensor.dtype not in WORDS:
        raise CheckpointError(f"cannot write dtype {tensor.dtype}; known are {sorted(map(str, WORDS))}")
    return Spec(tuple(tensor.shape), WORDS[tensor.dtype], tensor.numel() * tensor.element_size())


def raw(tensor: Tensor) -> Any:
    """The bytes of a tensor, row-major, as a buffer (no copy for a contiguous CPU tensor)."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy()


class SafetensorsFile:
    """An open file with room for `specs`, laid out in their order."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        self._offsets: dict[str, tuple[int, Spec]] = {}
        end = 0
        for name, item in specs.items():
            header[name] = {
                "dtype": item.dtype,
                "shape": list(item.shape),
                "data_offsets": [end, end + item.size],
            }
            self._offsets[name] = (end, item)
            end += item.size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._left = set(specs)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor to its place."""
        offset, item = self._offsets[name]
        assert spec(tensor) == item, f"{name}: {spec(tensor)} is not {item}"
        self._file.seek(self._start + offset)
        self._file.write(raw(tensor))
        self._left.discard(name)

    def close(self) -> None:
        """Flushes to the disk; every tensor must have been put."""
        assert not self._left, f"not written: {sorted(self._left)}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes without looking, after a failure."""
        self._file.close()

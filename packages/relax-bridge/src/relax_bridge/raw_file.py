"""Reads any rows or columns of a safetensors file's tensors straight into memory that is already there.

Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON, data).
"""

import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_bridge.errors import CheckpointError


class RawFile:
    """A safetensors file opened for reading at offsets; closed with the object."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        size = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(size))
        self._begin = {
            name: 8 + size + item["data_offsets"][0]
            for name, item in header.items()
            if name != "__metadata__"
        }

    def read_into(self, out: Tensor, name: str, skip: int) -> None:
        """Fills `out` (contiguous, CPU) with consecutive elements, from element `skip` of the tensor.

        Raises:
            CheckpointError: the file has become shorter than it was.
        """
        view = _as_bytes(out)
        offset = self._begin[name] + skip * out.element_size()
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if not count:
                raise CheckpointError(f"{self._path} ends inside {name}")
            done += count

    def read_columns_into(self, out: Tensor, name: str, skip: int, width: int) -> None:
        """Fills `out` [R, c] with the first c of `width` columns of R rows, from element `skip` on.

        Only the pages that hold those columns are read.
        """
        item = out.element_size()
        offset = self._begin[name] + skip * item
        length = ((out.shape[0] - 1) * width + out.shape[1]) * item
        page = offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(
            self._file.fileno(), length + page, access=mmap.ACCESS_COPY, offset=offset - page
        ) as mapped:
            stored = torch.frombuffer(mapped, dtype=torch.uint8, offset=page, count=length)
            if stored.data_ptr() % item:
                # Headers of other writers may leave data unaligned; then elements cannot be viewed in place.
                stored = stored.clone()
            out.copy_(stored.view(out.dtype).as_strided(out.shape, (width, 1)))
            del stored


def _as_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    shared: Any = x.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(shared)

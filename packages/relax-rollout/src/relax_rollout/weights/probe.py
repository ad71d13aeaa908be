"""Whether one process can read another's memory or files: tried, not guessed from names of hosts."""

import json
import secrets
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from relax_rollout.weights.files import BucketFiles, FileSource
from relax_rollout.weights.ipc import IpcSender, open_handle

WORD_BYTES = 16


class Probe(Protocol):
    """A few bytes that are offered to others; `handle` is what :func:`sees` needs."""

    handle: str

    def close(self) -> None:
        """Take them back."""
        ...


class MemoryProbe:
    """Of memory that has a handle.

    Args:
        device: where.

    Raises:
        ValueError: this system gives no handles to its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._sender = IpcSender()
        word = secrets.token_bytes(WORD_BYTES)
        tensor = torch.frombuffer(bytearray(word), dtype=torch.uint8).to(device)
        (bucket,) = self._sender.buckets({"word": tensor}, {})
        self.handle: str = json.dumps(["memory", bucket.handle, word.hex()])

    def close(self) -> None:
        """See :class:`Probe`."""
        self._sender.close()


class FileProbe:
    """Of a folder.

    Args:
        folder: see :class:`relax_rollout.weights.files.BucketFiles`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._files = BucketFiles(folder)
        word = secrets.token_bytes(WORD_BYTES)
        path, room = self._files.create(WORD_BYTES)
        room.copy_(torch.frombuffer(bytearray(word), dtype=torch.uint8))
        self.handle: str = json.dumps(["file", path, word.hex()])

    def close(self) -> None:
        """See :class:`Probe`."""
        self._files.close()


def sees(handle: str, device: torch.device) -> bool:
    """Whether this process finds what a probe offers.

    Args:
        handle: of the probe.
        device: where memory is taken to be, by its number here.
    """
    kind, where, word = json.loads(handle)
    try:
        found: Tensor
        if kind == "memory":
            found = open_handle(where, device)
        else:
            found = FileSource(where).fetch(WORD_BYTES, torch.device("cpu"))
        return bool(bytes(found[:WORD_BYTES].tolist()).hex() == word)
    except (ValueError, RuntimeError, OSError):
        return False

"""The path by files: shared memory of one host, or a file system that several hosts share."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


class FileSource:
    """A bucket in a file, mapped and not copied: a device takes it tensor by tensor when the update ends."""

    stays = False

    def __init__(self, path: str) -> None:
        self._path = path

    def fetch(self, nbytes: int, device: torch.device) -> Tensor:
        """See :class:`relax_rollout.weights.receiver.Source`.

        Raises:
            ValueError: the file is not there or too short.
        """
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 - a path of the sender's, seen from here or not
        except OSError as error:
            raise ValueError(f"bucket file {self._path} cannot be read: {error.strerror}") from error
        if size < nbytes:
            raise ValueError(f"bucket file {self._path} has {size} bytes; {nbytes} were announced")
        return torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)


class BucketFiles:
    """The files of one update; they stay until :meth:`close`, so that they can be sent again.

    Args:
        folder: where; None is shared memory if this system has it, else the folder of temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is None:
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir()
        self._folder = Path(tempfile.mkdtemp(prefix="relax-weights-", dir=folder))
        self._count = 0

    def create(self, nbytes: int) -> tuple[str, Tensor]:
        """A new file, mapped: its path and its bytes to write, uint8 [nbytes]."""
        path = self._folder / f"bucket-{self._count}"
        self._count += 1
        with path.open("wb") as file:
            file.truncate(nbytes)
        return str(path), torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Remove the files; whoever has them mapped keeps the bytes."""
        shutil.rmtree(self._folder, ignore_errors=True)

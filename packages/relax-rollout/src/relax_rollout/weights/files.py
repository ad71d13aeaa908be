"""The path by files: shared memory of one host, or a file system that several hosts share."""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

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


class OwnFolder:
    """A new folder that goes with `close`; those whose owners were killed go with the next one beside them.

    An owner holds a lock, which tells whether it lives in other containers and on other hosts, too.

    Args:
        parent: where; what has the same prefix there and no owner any more is removed.
    """

    _PREFIX, _LOCK = "relax-weights-", "owner"

    def __init__(self, parent: Path) -> None:
        for old in parent.glob(f"{self._PREFIX}*/{self._LOCK}"):
            _remove_if_left(old)
        self.path = Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=parent))
        # Under its name it is locked from the first moment on.
        unnamed = self.path / f".{self._LOCK}"
        self._lock = unnamed.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s has no locks (%s): what killed runs leave there stays", parent, error.strerror)
        else:
            unnamed.rename(self.path / self._LOCK)

    def close(self) -> None:
        """Remove it; whoever has its files mapped keeps the bytes."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_left(lock: Path) -> None:
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    # It is owned, another user's, or has just been removed.
    except OSError:
        return


class BucketFiles:
    """The files of one update; they stay until :meth:`close`, so that they can be sent again.

    Args:
        folder: where; None is shared memory if this system has it, else the folder of temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is None:
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir()
        self._folder = OwnFolder(Path(folder))
        self._count = 0

    def create(self, nbytes: int) -> tuple[str, Tensor]:
        """A new file, mapped: its path and its bytes to write, uint8 [nbytes]."""
        path = self._folder.path / f"bucket-{self._count}"
        self._count += 1
        with path.open("wb") as file:
            file.truncate(nbytes)
        return str(path), torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Remove the files; whoever has them mapped keeps the bytes."""
        self._folder.close()

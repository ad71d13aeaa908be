"""Folders of one process under the temporary directory; what killed processes left is removed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """A new folder that carries this process's id, its name short enough for sockets; goes with the block.

    Folders of the same prefix whose processes are no more are removed first.

    Args:
        prefix: of the name, such as "relax-ray-".
    """
    root = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    for old in root.glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

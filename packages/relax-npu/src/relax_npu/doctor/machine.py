"""What the doctor may look at, so that tests can show it another machine."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_npu.probe import Probe, probe


def disk_bytes(path: Path) -> int:
    """The size of the file system that a path lies on, in bytes."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def port_free(port: int) -> bool:
    """Whether a TCP port of this host can be listened on now."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class Machine:
    """A host as the doctor sees it.

    Attributes:
        root: where its file system begins.
        environment: the variables of the process that would use the NPU.
        python: its Python, "major.minor".
        probe: tries torch_npu out.
        disk_bytes: the size of the file system under a path.
        port_free: whether a TCP port can be listened on.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    probe: Callable[[], Probe] = probe
    disk_bytes: Callable[[Path], int] = disk_bytes
    port_free: Callable[[int], bool] = port_free

    def path(self, absolute: str) -> Path:
        """A path of that machine."""
        return self.root / absolute.lstrip("/")

    def exists(self, absolute: str) -> bool:
        """Whether a path is there for this user; one below a folder that is closed to them is not."""
        try:
            return self.path(absolute).exists()
        except OSError:
            return False

    def is_folder(self, absolute: str) -> bool:
        """Whether a path is a folder that this user sees."""
        try:
            return self.path(absolute).is_dir()
        except OSError:
            return False

    def read(self, absolute: str) -> str | None:
        """A file's text, or None when it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

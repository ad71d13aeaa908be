"""What the doctor may look at, so that tests can show it another machine."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_npu.probe import Probe, probe


@dataclass(frozen=True)
class Machine:
    """A host as the doctor sees it.

    Attributes:
        root: where its file system begins.
        environment: the variables of the process that would use the NPU.
        python: its Python, "major.minor".
        probe: tries torch_npu out.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    probe: Callable[[], Probe] = probe

    def path(self, absolute: str) -> Path:
        """A path of that machine."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """A file's text, or None when it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

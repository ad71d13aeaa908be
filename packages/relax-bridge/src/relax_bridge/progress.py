"""A progress bar on a terminal; nothing anywhere else."""

import sys
import time
from typing import TextIO

_WIDTH = 30
_EVERY_S = 0.1


class Progress:
    """A bar of bytes on standard error, drawn at most ten times a second; use it as a context.

    Args:
        label: what is going on.
        stream: where to draw; by default standard error, and nothing unless that is a terminal.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._began = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._drawn:
            self._stream.write("\n")
            self._stream.flush()

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total` bytes."""
        now = time.monotonic()
        if not self._shown or (now - self._drawn < _EVERY_S and done < total):
            return
        self._drawn = now
        share = done / total if total else 1.0
        bar = "#" * round(share * _WIDTH)
        rate = done / max(now - self._began, 1e-9) / 1e9
        text = f"\r{self._label} [{bar:<{_WIDTH}}] {share:4.0%} {done / 1e9:.2f} GB {rate:.2f} GB/s"
        self._stream.write(text)
        self._stream.flush()

"""Log lines of a run: all of ours to `log.txt`, warnings also to the terminal, secrets to neither."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from relax_core.run.files import writing
from relax_core.run.secrets import Masker, MaskingFormatter

_OURS = ("relax_core", "relax_rollout", "relax_bridge", "relax_kernels", "relax_npu")


class _LogFile(logging.FileHandler):
    """A file handler that says once, not with every line, that it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self.setLevel(logging.CRITICAL + 1)
        logging.getLogger(__name__).warning("%s is not written any more: %s", self.baseFilename, error)

    def close(self) -> None:
        """Closes the file; lines that a full disk refused are lost, as was said when it happened."""
        with suppress(OSError):
            super().close()


class _Terminal(logging.Handler):
    """Prints above a live view without disturbing it. Python warnings speak to developers: only the file."""

    def __init__(self, console: Console, mask: Masker) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._mask = mask

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "py.warnings":
            return
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        message = escape(self._mask(record.getMessage()))
        self._console.print(f"[{style}]{record.levelname.lower()}[/] {message}", soft_wrap=True)


@contextmanager
def logging_to(path: Path, mask: Masker, console: Console, *, level: str) -> Iterator[None]:
    """Sends log lines to a file and the terminal inside the `with` block.

    Args:
        path: `log.txt`; lines are appended.
        mask: hides secrets.
        console: gets warnings and errors, without tracebacks.
        level: least severe lines of Relax that reach the file; of other packages only warnings do.

    Raises:
        RunDirectoryError: the file cannot be opened.
    """
    with writing(path):
        file = _LogFile(path, encoding="utf-8")
    file.setFormatter(MaskingFormatter(mask, "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = _Terminal(console, mask)
    root = logging.getLogger()
    ours = [logging.getLogger(name) for name in _OURS]
    before = [logger.level for logger in ours]
    logging.captureWarnings(True)
    root.addHandler(file)
    root.addHandler(terminal)
    for logger in ours:
        logger.setLevel(level.upper())
    try:
        yield
    finally:
        for logger, old in zip(ours, before, strict=True):
            logger.setLevel(old)
        logging.captureWarnings(False)
        root.removeHandler(terminal)
        root.removeHandler(file)
        file.close()

"""`relax-report`: draws report.html from one or more run directories."""

import argparse
import errno
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.report import ReportError, read_run, render
from relax_core.report.read import unique_labels
from relax_core.run.files import RunDirectoryError, write_atomic


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; the process's own if None.

    Returns:
        The exit code: 0 done, 2 refused.
    """
    parser = argparse.ArgumentParser(
        "relax-report",
        description="Draws one HTML page with the curves, times and sampled completions of runs; it opens "
        "offline. Several runs are laid over each other.",
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help="run directory")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: report.html in the first run directory)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format="relax-report: %(message)s", level=logging.WARNING)
    try:
        target = draw(options.run_dirs, options.output)
    except (ReportError, RunDirectoryError) as error:
        sys.stderr.write(f"relax-report: {error}\n")
        return 2
    sys.stdout.write(f"{target}\n")
    return 0


def draw(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the page.

    Args:
        run_dirs: run directories, each once.
        output: the file; `report.html` in the first run directory if None.

    Returns:
        The file written.

    Raises:
        ReportError: a run cannot be read.
        RunDirectoryError: the file cannot be written.
    """
    labels = unique_labels(run_dirs)
    runs = [read_run(path, label=label) for path, label in zip(run_dirs, labels, strict=True)]
    target = output or run_dirs[0] / "report.html"
    # A lone half of a surrogate pair, which JSON may hold and UTF-8 may not, is shown by its number.
    page = render(runs).encode(errors="backslashreplace")
    try:
        write_atomic(target, page)
    except RunDirectoryError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ReportError(
                f"cannot write {target}: {cause.strerror}; name a file elsewhere with --output"
            ) from error
        raise
    return target


if __name__ == "__main__":
    sys.exit(main())

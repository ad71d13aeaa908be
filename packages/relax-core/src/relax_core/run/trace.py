"""The timeline of a run, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format" (Google, 2016), a JSON array of complete events (`ph` X) with times in
microseconds; `M` events name the rows. The array is written as it grows: both readers accept one without
its end, as a killed run leaves it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from relax_core.run.files import writing

_PID = 1


class Trace:
    """Writes `trace.json`. Safe to use from several threads."""

    def __init__(self, path: Path, *, process: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begins a file.

        Args:
            path: replaced if it exists.
            process: name of the run.
            clock: gives seconds; zero of the timeline is now.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        self._clock = clock
        self._zero = clock()
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._taken: set[str] = set()
        with writing(path):
            self._file: IO[str] = path.open("w", encoding="utf-8")
            self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "pid": _PID, "tid": 0, "args": {"name": process}})

    def complete(self, name: str, row: str, begin: float, end: float, **arguments: Any) -> None:
        """Something that lasted.

        Args:
            name: what.
            row: where it is drawn; what overlaps in a row must nest.
            begin, end: by the clock.
            **arguments: numbers and words shown beside it.

        Raises:
            RunDirectoryError: the disk is full.
        """
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": round(1e6 * (begin - self._zero), 3),
                "dur": round(1e6 * (end - begin), 3),
                "pid": _PID,
                "tid": self._row(row),
                "args": arguments,
            }
        )

    @contextmanager
    def span(self, name: str, row: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """The time inside the `with` block, which may add to the arguments it is given.

        What goes on at once in one row is drawn in `row 2`, `row 3`...
        """
        lane = self._take_lane(row)
        begin = self._clock()
        try:
            yield arguments
        finally:
            self.complete(name, lane, begin, self._clock(), **arguments)
            with self._lock:
                self._taken.remove(lane)

    def flush(self) -> None:
        """Hands everything so far to the operating system; called once a step.

        Raises:
            RunDirectoryError: the disk is full.
        """
        with self._lock, writing(self._path):
            self._file.flush()

    def close(self) -> None:
        """Ends the array. Idempotent."""
        with self._lock, suppress(OSError):
            if not self._file.closed:
                self._file.write('{"name": "end", "ph": "M", "pid": 1, "tid": 0, "args": {}}\n]\n')
                self._file.close()

    def _take_lane(self, row: str) -> str:
        with self._lock:
            number, lane = 1, row
            while lane in self._taken:
                number += 1
                lane = f"{row} {number}"
            self._taken.add(lane)
            return lane

    def _row(self, name: str) -> int:
        with self._lock:
            known = name in self._rows
            number = self._rows.setdefault(name, len(self._rows) + 1)
        if not known:
            self._write(
                {"name": "thread_name", "ph": "M", "pid": _PID, "tid": number, "args": {"name": name}}
            )
        return number

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, ensure_ascii=False)
        with self._lock, writing(self._path):
            if not self._file.closed:
                self._file.write(line + ",\n")


_open: list[Trace] = []


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Inside the `with` block `span` of this process writes to `trace`, which is closed at its end."""
    _open.append(trace)
    try:
        yield
    finally:
        _open.remove(trace)
        trace.close()


@contextmanager
def span(name: str, row: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """See `Trace.span`; nothing where this process writes no trace."""
    if not _open:
        yield {}
        return
    with _open[-1].span(name, row, **arguments) as shown:
        yield shown

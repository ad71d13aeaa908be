"""The timeline of a run and its processes, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The process that drives the run writes the file; ranks and workers keep what they did until they are asked.

Format: "Trace Event Format" (Google, 2016), a JSON array of complete events (`ph` X) with times in
microseconds; `M` events name the rows. The array is written as it grows: both readers accept one without
its end, as a killed run leaves it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from relax_core.run.files import writing

Span = tuple[str, str, float, float, dict[str, Any]]
"""(name, row, begin, end, arguments)"""


@dataclass(frozen=True)
class ProcessSpans:
    """What another process did.

    Attributes:
        process: its name.
        now: seconds on its clock as it answered.
        spans: by that clock.
    """

    process: str
    now: float
    spans: Sequence[Span]


class Timeline:
    """Where spans go. Safe to use from several threads.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def complete(self, name: str, row: str, begin: float, end: float, **arguments: Any) -> None:
        """Something that lasted.

        Args:
            name: what.
            row: where it is drawn; what overlaps in a row must nest.
            begin, end: by the clock.
            **arguments: numbers and words shown beside it.
        """
        raise NotImplementedError

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

    def _take_lane(self, row: str) -> str:
        with self._lock:
            number, lane = 1, row
            while lane in self._taken:
                number += 1
                lane = f"{row} {number}"
            self._taken.add(lane)
            return lane


class SpanLog(Timeline):
    """Keeps the spans of this process until the one that writes the trace asks for them."""

    def __init__(self, process: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._process = process
        self._spans: list[Span] = []

    def complete(self, name: str, row: str, begin: float, end: float, **arguments: Any) -> None:
        """See `Timeline`."""
        with self._lock:
            self._spans.append((name, row, begin, end, arguments))

    def take(self) -> ProcessSpans:
        """The spans since the last time."""
        with self._lock:
            spans, self._spans = self._spans, []
        return ProcessSpans(self._process, self._clock(), spans)


class Trace(Timeline):
    """Writes `trace.json`."""

    def __init__(self, path: Path, *, process: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begins a file.

        Args:
            path: replaced if it exists.
            process: name of the run.
            clock: gives seconds; zero of the timeline is now.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        super().__init__(clock)
        self._zero = clock()
        self._path = path
        self._process = process
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], int] = {}
        self._offsets: dict[str, tuple[float, float]] = {}
        with writing(path):
            self._file: IO[str] = path.open("w", encoding="utf-8")
            self._file.write("[\n")
        self._place(process, None)

    def complete(self, name: str, row: str, begin: float, end: float, **arguments: Any) -> None:
        """See `Timeline`.

        Raises:
            RunDirectoryError: the disk is full.
        """
        self._draw(self._process, (name, row, begin, end, arguments), 0.0)

    def others(self, answers: Sequence[ProcessSpans], asked: float, answered: float) -> None:
        """What other processes did, who were asked and have answered at these times of this clock.

        A process's clock read its `now` somewhere between the question and the answer, in the middle at
        best; the shortest of all questions so far tells most. Where the clocks may as well be one, as those
        of one machine are, they are taken as one.

        Raises:
            RunDirectoryError: the disk is full.
        """
        for answer in answers:
            slack = (answered - asked) / 2
            if answer.process not in self._offsets or slack < self._offsets[answer.process][0]:
                offset = (asked + answered) / 2 - answer.now
                self._offsets[answer.process] = slack, 0.0 if abs(offset) <= slack else offset
            for span in answer.spans:
                self._draw(answer.process, span, self._offsets[answer.process][1])

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

    def _draw(self, process: str, span: Span, offset: float) -> None:
        name, row, begin, end, arguments = span
        # What began before the trace did is drawn from its zero.
        begin, end = (max(0.0, moment + offset - self._zero) for moment in (begin, end))
        pid, tid = self._place(process, row)
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": round(1e6 * begin, 3),
                "dur": round(1e6 * (end - begin), 3),
                "pid": pid,
                "tid": tid,
                "args": arguments,
            }
        )

    def _place(self, process: str, row: str | None) -> tuple[int, int]:
        """The numbers of a process and a row, which the file is told of when they are first seen."""
        with self._lock:
            new_process = process not in self._processes
            pid = self._processes.setdefault(process, len(self._processes) + 1)
            new_row = row is not None and (process, row) not in self._rows
            tid = 0 if row is None else self._rows.setdefault((process, row), len(self._rows) + 1)
        if new_process:
            self._name("process_name", pid, 0, process)
        if new_row:
            self._name("thread_name", pid, tid, str(row))
        return pid, tid

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})

    def _write(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, ensure_ascii=False)
        with self._lock, writing(self._path):
            if not self._file.closed:
                self._file.write(line + ",\n")


def in_lanes(spans: Sequence[Span]) -> list[Span]:
    """The same spans, by their beginning; what goes on at once in one row is drawn in `row 2`, `row 3`..."""
    ends: dict[str, list[float]] = {}
    drawn: list[Span] = []
    for name, row, begin, end, arguments in sorted(spans, key=lambda span: span[2]):
        lanes = ends.setdefault(row, [])
        free = next((number for number, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[free : free + 1] = [end]
        drawn.append((name, row if free == 0 else f"{row} {free + 1}", begin, end, arguments))
    return drawn


_open: list[Timeline] = []


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
def keeping_spans(process: str) -> Iterator[SpanLog]:
    """Inside the `with` block `span` of this process writes to a log, for another process to ask for."""
    log = SpanLog(process)
    _open.append(log)
    try:
        yield log
    finally:
        _open.remove(log)


@contextmanager
def span(name: str, row: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """See `Timeline.span`; nothing where this process draws no timeline."""
    if not _open:
        yield {}
        return
    with _open[-1].span(name, row, **arguments) as shown:
        yield shown


def draw_others(answers: Sequence[ProcessSpans], asked: float, answered: float) -> None:
    """See `Trace.others`; nothing where this process writes no trace."""
    if _open and isinstance(_open[-1], Trace):
        _open[-1].others(answers, asked, answered)

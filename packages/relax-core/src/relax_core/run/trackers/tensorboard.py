"""TensorBoard's event files, written for every run."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from relax_core.run.files import writing


class TensorBoardTracker:
    """Event files that `tensorboard --logdir RUN_DIR` shows.

    Each step is handed to the operating system at once, by the calling thread: no step is lost with a killed
    process, and a full disk is an error of this call.
    """

    def __init__(self, folder: Path, *, first_step: int | None = None) -> None:
        """Opens a new event file.

        Args:
            folder: `tensorboard/` of the run.
            first_step: on resume, the first step to come: TensorBoard then hides later ones of earlier files.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = folder
        # TensorBoard reads the files of a folder in the order of their names.
        number = len(list(folder.glob("events.out.tfevents.*"))) if folder.is_dir() else 0
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{number}"
        with writing(folder):
            folder.mkdir(exist_ok=True)
            self._file: IO[bytes] = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=first_step, session_log=start))
        self._flush()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag.

        Raises:
            RunDirectoryError: the disk is full or the file not writable.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        for tag, value in numbers.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            self._write(Event(wall_time=now, step=step, summary=summary))
        self._flush()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with suppress(OSError):
            self._file.close()

    def _write(self, event: Any) -> None:
        with writing(self._folder):
            self._records.write(event.SerializeToString())

    def _flush(self) -> None:
        with writing(self._folder):
            self._records.flush()

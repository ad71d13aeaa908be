"""Ctrl-C and SIGTERM ask a run to end after its step; a second Ctrl-C ends it at once."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_log = logging.getLogger(__name__)


class Interruption:
    """While entered, `requested` tells whether the run was asked to end.

    Outside of the main thread signals cannot be caught; then it is never requested.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        _log.warning("%s: the run ends once this step is done and saved (once more ends it at once)", name)

"""Ctrl-C and SIGTERM: while a run starts they end it at once, later after its step; a second one at once."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_log = logging.getLogger(__name__)


class Interruption:
    """While entered, SIGINT and SIGTERM raise `KeyboardInterrupt`, or wait for a good moment after `defer`.

    Outside of the main thread signals cannot be caught; then nothing is ever requested.

    Attributes:
        requested: the run was asked to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferring = False
        self._before: dict[int, Any] = {}

    def defer(self) -> None:
        """From here on the first signal only sets `requested`.

        Raises:
            KeyboardInterrupt: a signal came before and its exception was lost, as it is in modules that
                swallow every exception while they are imported.
        """
        if self.requested:
            raise KeyboardInterrupt
        self._deferring = True

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
        first, self.requested = not self.requested, True
        if not (first and self._deferring):
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        _log.warning("%s: the run ends once this step is done and saved (once more ends it at once)", name)

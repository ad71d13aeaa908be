"""What a trainer process is watched by: its device's profiler, and snapshots of its memory, by step."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relax_core.device import Device
from relax_core.loop.memory import is_out_of_memory
from relax_core.run.config import RunConfig
from relax_core.run.files import writing

_log = logging.getLogger(__name__)


def watches(config: RunConfig) -> bool:
    """Whether anything is watched in the run."""
    return config.memory_snapshot or config.profile_from > 0 or config.memory_from > 0


def in_window(config: RunConfig, step: int) -> bool:
    """Whether `step` is profiled, or its memory recorded."""
    return _profiled(config, step) or _recorded(config, step)


class Watch:
    """Watches this process, one of `ranks` that each write files of their own.

    Args:
        config: of the run.
        device: of this process.
        rank: of this process.
        ranks: in all.
    """

    def __init__(self, config: RunConfig, device: Device, rank: int, ranks: int) -> None:
        self._config = config
        self._device = device
        self._suffix = f"_rank{rank}" if ranks > 1 else ""
        self._folder: Path | None = None
        self._step = 0
        self._recording = False
        self._profiling = ExitStack()

    def open(self, folder: Path) -> None:
        """Begins to keep what memory is used for, if that is asked for.

        Args:
            folder: the run's, where files go to `profile` and `memory`.
        """
        self._folder = folder
        if self._config.memory_snapshot:
            self._record()

    def begin(self, step: int) -> None:
        """Called before the work of a step of a window."""
        assert self._folder is not None, "open comes first"
        self._step = step
        # What was queued before belongs to the steps before, and what the step queues to the step.
        self._device.synchronize()
        if _recorded(self._config, step) and not self._config.memory_snapshot:
            self._record()
        if _profiled(self._config, step):
            folder = self._make("profile")
            self._profiling.enter_context(self._device.profile(folder, f"step_{step}{self._suffix}"))

    def end(self) -> None:
        """Called after it; writes what was seen.

        Raises:
            RunDirectoryError: a file cannot be written.
        """
        self._device.synchronize()
        if _profiled(self._config, self._step):
            with writing(self._make("profile")):
                self._profiling.close()
        if _recorded(self._config, self._step):
            self._dump(f"step_{self._step}{self._suffix}.pickle")
            if not self._config.memory_snapshot:
                self._forget()

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Where memory runs out inside the `with` block, writes what it was used for."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if self._config.memory_snapshot and self._folder is not None and is_out_of_memory(error):
                self._dump(f"out_of_memory{self._suffix}.pickle")
            raise

    def close(self) -> None:
        """Ends what is still watched, without a word of it. Idempotent."""
        error = RuntimeError("the step has not ended")
        self._profiling.__exit__(RuntimeError, error, None)
        self._forget()

    def _record(self) -> None:
        self._recording = self._device.record_memory(True)
        if not self._recording:
            _log.warning(
                "the device %s keeps no history of its memory: there will be no snapshots (run.memory_from, "
                "run.memory_snapshot)",
                self._device.name,
            )

    def _forget(self) -> None:
        if self._recording:
            self._recording = False
            self._device.record_memory(False)

    def _dump(self, name: str) -> None:
        if not self._recording:
            return
        file = self._make("memory") / name
        with writing(file):
            self._device.dump_memory(file)
        _log.warning("what memory was used for is in %s, to be opened in pytorch.org/memory_viz", file)

    def _make(self, name: str) -> Path:
        assert self._folder is not None, "open comes first"
        folder = self._folder / name
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def _profiled(config: RunConfig, step: int) -> bool:
    return 0 < config.profile_from <= step < config.profile_from + config.profile_steps


def _recorded(config: RunConfig, step: int) -> bool:
    return 0 < config.memory_from <= step < config.memory_from + config.memory_steps

"""Where the numbers of each step go beside the run directory's own files."""

from contextlib import ExitStack

from relax_core.run.trackers.registry import missing_package, open_tracker, wanted_trackers
from relax_core.run.trackers.tensorboard import TensorBoardTracker
from relax_core.run.trackers.tracker import TrackedRun, Tracker, tagged

__all__ = [
    "TensorBoardTracker",
    "TrackedRun",
    "Tracker",
    "missing_package",
    "open_tracker",
    "open_trackers",
    "tagged",
    "wanted_trackers",
]


def open_trackers(run: TrackedRun, *, first_step: int | None = None) -> list[Tracker]:
    """TensorBoard, and what else is wanted; if one cannot be opened the others are closed.

    Args:
        run: what they are opened for.
        first_step: on resume, the first step to come.

    Raises:
        ValueError: one's package is not installed, or it cannot be opened.
        RunDirectoryError: TensorBoard's file cannot be written.
    """
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        folder = run.folder / "tensorboard"
        trackers.append(TensorBoardTracker(folder, first_step=first_step))
        stack.callback(trackers[-1].close)
        for name in wanted_trackers(run.settings):
            trackers.append(open_tracker(name, run))
            stack.callback(trackers[-1].close)
        stack.pop_all()
    return trackers

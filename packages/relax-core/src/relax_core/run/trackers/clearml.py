"""ClearML."""

from collections.abc import Mapping

from relax_core.run.trackers.tracker import TrackedRun


class ClearmlTracker:
    """A task of ClearML under the run directory's name; a resumed run goes on with the task of that name."""

    def __init__(self, run: TrackedRun) -> None:
        """Starts or continues the task."""
        from clearml import Task

        self._task = Task.init(
            project_name=run.settings.tracker_project,
            task_name=run.folder.name,
            # An integer continues without moving the steps that are reported.
            continue_last_task=0 if run.resumed else False,
            reuse_last_task_id=False,
            # Models, TensorBoard files and command lines are kept in the run directory.
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
        )
        self._task.connect_configuration(dict(run.config), name="relax")
        self._logger = self._task.get_logger()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        for tag, value in numbers.items():
            title, _, series = tag.partition("/")
            self._logger.report_scalar(title, series, value, iteration=step)

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        self._task.close()

"""torch's profiler on chosen steps of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from relax_core.config.root import RelaxConfig
from relax_core.run import RunDirectory
from relax_core.run.files import writing


@contextmanager
def profiled(step: int, config: RelaxConfig, directory: RunDirectory) -> Iterator[None]:
    """Profiles what this process does inside the `with` block in steps of the window that the config gives.

    Operators on the CPU and, where there is CUDA, kernels go to `profile/step_<step>.json`, a trace for
    Perfetto. Nothing is written after an error.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    first = config.run.profile_from
    if first == 0 or not first <= step < first + config.run.profile_steps:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    folder = directory.path / "profile"
    with writing(folder):
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"step_{step}.json"))

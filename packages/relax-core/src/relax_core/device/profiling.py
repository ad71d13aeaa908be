"""torch's own profiler, for the devices that it knows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@contextmanager
def torch_profile(folder: Path, name: str, activities: Sequence[ProfilerActivity]) -> Iterator[None]:
    """Profiles what this thread does inside the `with` block; see `Device.profile`."""
    # There is one cycle; without `acc_events` torch warns that it clears those before it.
    with profile(activities=list(activities), acc_events=True) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"{name}.json"))

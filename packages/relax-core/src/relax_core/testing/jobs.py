"""What the ranks of a pool can be asked to do, by name: functions of the row and the world."""

from collections.abc import Callable
from typing import Any

from relax_core.testing.faults import train_with_fault
from relax_core.testing.measuring import measure
from relax_core.testing.resuming import resume, save
from relax_core.testing.timing import time_steps
from relax_core.testing.training import train

JOBS: dict[str, Callable[..., Any]] = {
    "train": train,
    "train_with_fault": train_with_fault,
    "measure": measure,
    "save": save,
    "resume": resume,
    "time": time_steps,
}

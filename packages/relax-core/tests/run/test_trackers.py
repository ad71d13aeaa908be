import math

import pytest
from relax_core.run import RunDirectoryError
from relax_core.run.trackers import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_every_step_without_waiting_for_the_end(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tensorboard")
    tracker.log(1, {"loss/loss": 0.5, "reward/reward": 1})
    tracker.log(2, {"loss/loss": math.inf})
    assert scalars(tmp_path / "tensorboard") == {
        "loss/loss": [(1, 0.5), (2, math.inf)],
        "reward/reward": [(1, 1.0)],
    }
    tracker.close()
    tracker.close()


def test_steps_that_a_resumed_run_lost_are_hidden(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"loss": step})
    first.close()
    second = TensorBoardTracker(tmp_path, first_step=2)
    second.log(2, {"loss": 20})
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 20.0)]}


def test_a_full_disk_is_an_error_of_the_step(tmp_path, file_size_limit):
    tracker = TensorBoardTracker(tmp_path)
    with file_size_limit(200), pytest.raises(RunDirectoryError, match="limit on file sizes"):
        tracker.log(1, {f"loss/{number}": number for number in range(20)})
    tracker.close()

"""A run whose steps' numbers arrive late, as from an accelerator, records what one that waits does."""

import json
import math

import pytest
from relax_core.device.readback import Readback
from relax_core.loop import run
from relax_core.loop.sft import SftLoop
from relax_core.run import Recorder, RunDirectory
from relax_core.testing.runs import records, start
from relax_core.trainer import trainer as trainer_module
from relax_core.trainer.optimizer import NonFiniteGradientError, Training


@pytest.fixture
def config(small_run, tmp_path):
    rows = [{"prompt": f"{i} plus {i}", "completion": str(2 * i)} for i in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return small_run(
        run={"steps": 6},
        algorithm={"name": "sft"},
        sft={"samples_per_step": 4},
        data={"path": str(tmp_path / "rows.jsonl"), "eval_path": None, "eval_fraction": 0.2},
        eval={"before": True, "every": 3, "after": False},
        checkpoint={"every": 4, "export": "never"},
    )


@pytest.fixture
def on_a_device(monkeypatch):
    """Numbers are ready once they were waited for; (what is read, what happened in order)."""
    events = []

    class InFlight(Readback):
        ready = False

        def read(self):
            self.ready = True
            return super().read()

    def told(owner, name, word):
        function = getattr(owner, name)

        def call(self, step, *args, **options):
            events.append(f"{word} {step}")
            return function(self, step, *args, **options)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(trainer_module, "Readback", InFlight)
    told(SftLoop, "step", "train")
    told(SftLoop, "evaluate", "evaluate")
    told(Recorder, "step", "record")
    return events


def test_steps_are_recorded_behind_the_next_ones_and_before_whatever_reads_the_device(
    config, tmp_path, monkeypatch, on_a_device
):
    late = start(config, tmp_path / "late")
    assert on_a_device == [
        "evaluate 0", "record 0",
        "train 1", "train 2", "record 1", "train 3", "record 2", "evaluate 3", "record 3",
        "train 4", "record 4",  # a checkpoint
        "train 5", "train 6", "record 5", "record 6",  # the end
    ]  # fmt: skip
    short = config.model_copy(update={"run": config.run.model_copy(update={"steps": 4})})
    with RunDirectory.create(tmp_path / "again", short) as directory:
        monkeypatch.undo()
        assert run(short, directory, resume=False) == "finished"
        assert run(config, directory, resume=True) == "finished"
    assert records(directory) == records(late)


def test_the_step_before_one_that_fails_is_recorded(config, tmp_path, monkeypatch, on_a_device):
    step = SftLoop.step

    def fail(self, number):
        if number == 2:
            raise OSError("no more data")
        return step(self, number)

    monkeypatch.setattr(SftLoop, "step", fail)
    with (
        RunDirectory.create(tmp_path / "failed", config) as directory,
        pytest.raises(OSError, match="no more data"),
    ):
        run(config, directory, resume=False)
    assert [record["step"] for record in records(directory)] == [0, 1]


def test_a_gradient_that_is_not_finite_ends_the_run_one_step_later_and_is_not_saved(
    config, tmp_path, monkeypatch, on_a_device
):
    norm = Training.grad_norm
    monkeypatch.setattr(
        Training, "grad_norm", lambda self: norm(self) * (math.nan if on_a_device[-1] == "train 5" else 1)
    )
    with (
        RunDirectory.create(tmp_path / "failed", config) as directory,
        pytest.raises(NonFiniteGradientError, match="the optimizer step was not taken"),
    ):
        run(config, directory, resume=False)
    assert on_a_device[-2:] == ["train 5", "train 6"]
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step_4"]
    assert [record["step"] for record in records(directory)] == [0, 1, 2, 3, 4]

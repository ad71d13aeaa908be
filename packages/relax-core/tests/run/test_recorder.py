import io
import json
import logging
import warnings

import pytest
from relax_core.config import load_config
from relax_core.run import Recorder, RunDirectory, RunDirectoryError, logging_to, read_jsonl
from rich.console import Console


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Run:
    """One run directory whose recorder is opened again and again."""

    def __init__(self, path, *flags):
        self.config = load_config("quickstart", ["--run.steps=4", "--trainer.warmup_steps=0", *flags])
        self.directory = RunDirectory.create(path, self.config)
        self.clock = Clock()
        self.terminal = io.StringIO()

    def open(self, **options):
        console = Console(file=self.terminal, width=100)
        options = {"console": console, "clock": self.clock, "age": 0.0, **options}
        return Recorder(self.directory, self.config, **options)

    def one_step(self, recorder, step, **metrics):
        with recorder.phase("rollout"):
            self.clock.now += 2
        with recorder.phase("train"):
            self.clock.now += 1
        samples = [{"prompt": f"p{i}", "completion": "c", "reward": i, "advantage": 0.0} for i in range(3)]
        return recorder.step(step, {"reward": step / 4, "train_tokens": 300, **metrics}, samples)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.directory.close()


def without_time(path):
    return [{k: v for k, v in record.items() if k != "time"} for record in read_jsonl(path)]


def test_a_step_is_one_line_whose_time_is_apart(run):
    with run.open() as recorder:
        recorder.step(0, {"eval_accuracy": 0.25})
        run.one_step(recorder, 1, loss=0.5)
    records = read_jsonl(run.directory.metrics)
    assert without_time(run.directory.metrics) == [
        {"step": 0, "eval_accuracy": 0.25},
        {"step": 1, "reward": 0.25, "train_tokens": 300, "loss": 0.5},
    ]
    time = records[1]["time"]
    assert time["phases"] == {"rollout": 2.0, "train": 1.0}
    assert (time["total"], time["elapsed"], time["tokens_per_s"]) == (3.0, 3.0, 100.0)
    assert time["peak_rss_gib"] > 0.01


def test_as_many_samples_as_asked_for_are_kept(tmp_path):
    run = Run(tmp_path / "run", "--run.samples_per_step", "2")
    with run.open() as recorder:
        run.one_step(recorder, 1)
    assert read_jsonl(run.directory.samples) == [
        {"step": 1, "prompt": f"p{i}", "completion": "c", "reward": i, "advantage": 0.0} for i in range(2)
    ]
    run.directory.close()


def test_sampling_for_an_evaluation_is_time_of_the_evaluation(run):
    with run.open() as recorder:
        with recorder.phase("eval"), recorder.phase("rollout"):
            run.clock.now += 4
        assert run.one_step(recorder, 1)["time"]["phases"] == {"eval": 4.0, "rollout": 2.0, "train": 1.0}


def test_an_interrupted_run_leaves_the_same_lines_as_an_uninterrupted_one(run, tmp_path):
    whole = Run(tmp_path / "whole")
    with whole.open() as recorder:
        for step in (1, 2, 3, 4):
            whole.one_step(recorder, step)
    with run.open() as recorder:
        for step in (1, 2, 3):
            run.one_step(recorder, step, **({"loss": 9.0} if step == 3 else {}))
    with run.directory.metrics.open("ab") as file:
        file.write(b'{"step": 4, "rew')
    with run.open(resume_step=2) as recorder:
        assert [record["step"] for record in recorder.history] == [1, 2]
        for step in (3, 4):
            run.one_step(recorder, step)
    assert without_time(run.directory.metrics) == without_time(whole.directory.metrics)
    assert run.directory.samples.read_bytes() == whole.directory.samples.read_bytes()
    assert read_jsonl(run.directory.metrics)[-1]["time"]["elapsed"] == 12.0, "the lost step is not counted"
    whole.directory.close()


def test_lost_metrics_are_noticed_on_resume(run):
    with run.open() as recorder:
        run.one_step(recorder, 1)
    lost = r"ends at step 1, but the checkpoint is of step 2"
    with pytest.raises(RunDirectoryError, match=lost), run.open(resume_step=2):
        pass


def test_without_a_checkpoint_a_resumed_run_begins_again_with_its_first_evaluation(run):
    with run.open() as recorder:
        recorder.step(0, {"eval_accuracy": 0.5})
        run.one_step(recorder, 1)
    with run.open(resume_step=0) as recorder:
        assert recorder.history == []
        recorder.step(0, {"eval_accuracy": 0.25})
    assert without_time(run.directory.metrics) == [{"step": 0, "eval_accuracy": 0.25}]
    assert run.directory.samples.read_bytes() == b""
    assert tensorboard_scalars(run.directory.tensorboard)["accuracy/eval_accuracy"] == [(0, 0.25)]


def test_nothing_is_touched_before_a_recorder_is_entered(run):
    with run.open() as recorder:
        run.one_step(recorder, 1)
    before = {file: file.read_bytes() for file in run.directory.path.rglob("*") if file.is_file()}
    run.open(resume_step=0)
    assert {f: f.read_bytes() for f in run.directory.path.rglob("*") if f.is_file()} == before


def test_steps_out_of_order_and_values_that_are_no_numbers_are_refused(run):
    with run.open() as recorder:
        with pytest.raises(ValueError, match="step 2 does not follow step -1"):
            recorder.step(2, {})
        run.one_step(recorder, 1)
        with pytest.raises(ValueError, match="step 1 does not follow step 1"):
            recorder.step(1, {})
        with pytest.raises(ValueError, match="metric loss is a str"):
            recorder.step(2, {"loss": "0.5"})
        with pytest.raises(ValueError, match="there is no phase 'sleep'; phases are rollout, reward"):
            recorder.phase("sleep").__enter__()


def test_finishing_writes_the_summary(run):
    with run.open(age=10.0) as recorder:
        recorder.step(0, {"eval_accuracy": 0.25})
        for step in (1, 2, 3, 4):
            run.one_step(recorder, step)
        summary = recorder.finish(best_step=4)
    assert json.loads(run.directory.summary.read_text()) == summary
    assert summary["wall_s"] == 22.0
    assert summary["train_tokens_per_s"] == 300.0
    assert (summary["reward_first"], summary["reward_last"], summary["best_step"]) == (0.25, 1.0, 4)
    assert run.directory.finished


def test_plain_lines_tell_step_numbers_phases_and_time_left(run):
    with run.open() as recorder:
        recorder.step(0, {"eval_accuracy": 0.25})
        run.one_step(recorder, 1, accuracy=0.5, entropy=1.25, policy_kl=0.001)
    lines = run.terminal.getvalue().splitlines()
    assert lines == [
        "before training  held-out 0.25",
        "step 1/4  reward 0.25  accuracy 0.5  entropy 1.25  KL of update 0.001  100 tokens/s  "
        "3.00 s (rollout 2.00, train 1.00)  ETA 9 s",
    ]


def test_the_live_view_shows_the_same_and_a_curve(tmp_path):
    run = Run(tmp_path / "run", "--run.progress", "live")
    console = Console(file=run.terminal, width=100, force_terminal=True, color_system=None)
    with run.open(console=console) as recorder:
        recorder.step(0, {"eval_accuracy": 0.25})
        for step in (1, 2, 3):
            run.one_step(recorder, step, accuracy=0.5, entropy=1.25, eval_accuracy=0.5)
    last = run.terminal.getvalue().rsplit("╭", 1)[1]
    for words in ("step 3/4", "ETA 3 s", "reward", "▁▅█", "0.25 → 0.5", "entropy", "100", "rollout 2.00 s"):
        assert words in last
    run.directory.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_follows_a_live_view_starts_on_a_line_of_its_own(tmp_path, terminal):
    run = Run(tmp_path / "run", "--run.progress", "live")
    console = Console(file=run.terminal, width=100, force_terminal=terminal, color_system=None)
    with run.open(console=console) as recorder:
        run.one_step(recorder, 1)
    console.print("Finished")
    assert run.terminal.getvalue().splitlines()[-1].removeprefix("\x1b[?25h") == "Finished"
    run.directory.close()


def test_nothing_is_shown_if_so_asked(tmp_path):
    run = Run(tmp_path / "run", "--run.progress", "none")
    with run.open() as recorder:
        run.one_step(recorder, 1)
    assert run.terminal.getvalue() == ""
    run.directory.close()


def tensorboard_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_and_forgets_what_a_resumed_run_lost(run):
    with run.open() as recorder:
        for step in (1, 2, 3):
            run.one_step(recorder, step, reward=-1.0 if step == 3 else step / 4, mine=7)
    with run.open(resume_step=2) as recorder:
        run.one_step(recorder, 3)
    found = tensorboard_scalars(run.directory.tensorboard)
    assert found["reward/reward"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert found["other/mine"] == [(1, 7.0), (2, 7.0)]
    assert found["time/rollout"] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_log_levels_split_between_file_and_terminal(run, tmp_path):
    console = Console(file=run.terminal, width=100)
    with logging_to(run.directory.log, run.directory.mask, console, level="info"):
        ours, other = logging.getLogger("relax_core.loop"), logging.getLogger("elsewhere")
        ours.debug("ours debug")
        ours.info("ours info")
        warnings.warn("for developers", stacklevel=1)
        other.info("other info")
        try:
            raise ValueError("deep")
        except ValueError:
            other.error("other [red]error[/red]", exc_info=True)
    logging.getLogger("relax_core.loop").error("after the end")
    text = run.directory.log.read_text()
    assert "INFO relax_core.loop: ours info" in text
    assert "ValueError: deep" in text
    assert "for developers" in text
    assert "debug" not in text
    assert "other info" not in text
    assert "after the end" not in text
    assert run.terminal.getvalue() == "error other [red]error[/red]\n"


def test_a_log_file_on_a_full_disk_says_so_once(run):
    run.directory.log.symlink_to("/dev/full")
    console = Console(file=run.terminal, width=200)
    with logging_to(run.directory.log, run.directory.mask, console, level="info"):
        for _ in range(3):
            logging.getLogger("relax_core.loop").info("line")
    assert run.terminal.getvalue().count("is not written any more") == 1

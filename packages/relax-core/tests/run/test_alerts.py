"""Alerts: each check at its bound, on series made by hand; when they are raised, and where they go."""

import io
import json
import math

import pytest
from relax_core.config import load_config
from relax_core.run import Recorder, RunDirectory, logging_to
from relax_core.run.alerts import CHECKS, raised
from rich.console import Console


def settings(*flags):
    return load_config("quickstart", ["--alerts.window=2", "--alerts.stuck_steps=4", *flags])


def steps_of(**series):
    """Steps 1, 2, ... of metrics given as lists."""
    names = list(series)
    rows = zip(*series.values(), strict=True)
    return [{"step": n, **dict(zip(names, row, strict=True)), "time": {}} for n, row in enumerate(rows, 1)]


def raised_at(config, **series):
    """The steps at which each alert is raised, as a run would see them one after another."""
    steps = steps_of(**series)
    return [(end, alert.name) for end in range(1, len(steps) + 1) for alert in raised(steps[:end], config)]


def test_what_is_not_finite_is_named_and_read_back_as_the_file_has_it():
    (alert,) = raised([{"step": 1, "loss": math.nan, "kl": 0.5, "ratio": "Infinity"}], settings())
    assert alert.name == "not_finite"
    assert alert.message == "loss, ratio are not finite"
    assert "trainer.lr" in alert.advice
    assert raised([{"step": 1, "loss": math.nan}], settings("--alerts.not_finite=false")) == []


def test_the_gap_has_the_bound_of_the_rollout():
    steps = steps_of(logprob_gap_mean=[0.2])
    (alert,) = raised(steps, settings())
    assert alert.message == (
        "log-probs of trainer and engine differ by 0.2 nats on average, above rollout.warn_logprob_gap = 0.1"
    )
    assert raised(steps, settings("--rollout.warn_logprob_gap=0.25")) == []
    assert raised(steps, settings("--rollout.warn_logprob_gap=null")) == []
    names = [alert.name for alert in raised(steps_of(logprob_gap_mean=[math.nan]), settings())]
    assert names == ["not_finite", "logprob_gap"]


def test_entropy_collapses_when_its_mean_is_below_a_tenth_of_the_first():
    # The means of two steps are 2.0 first and 0.2, 0.15 last: only the latter is below a tenth.
    entropy = [2.0, 2.0, 0.2, 0.2, 0.1, 0.1]
    assert raised_at(settings(), entropy=entropy) == [(5, "entropy_collapse")]
    assert raised_at(settings(), entropy=entropy, accuracy=[0, 0, 0.5, 0.5, 0.9, 0.9]) == [
        (5, "entropy_collapse")
    ], "accuracy 0.7 on average at step 5"
    assert raised_at(settings(), entropy=entropy, accuracy=[0, 0, 0.9, 0.9, 0.9, 0.9]) == [], "it has learnt"
    assert raised_at(settings("--alerts.entropy_fraction=null"), entropy=entropy) == []


def test_length_blows_up_when_its_mean_passes_three_times_the_first():
    length = [10.0, 10.0, 30.0, 30.0, 31.0, 100.0]
    assert raised_at(settings(), response_length_mean=length) == [(5, "length_blow_up")]
    assert raised_at(settings("--alerts.length_growth=7"), response_length_mean=length) == []


def test_more_than_half_cut_is_an_alert_after_a_whole_window():
    assert raised_at(settings(), truncated_fraction=[0.9, 0.2, 0.8, 0.9]) == [
        (2, "truncated"),
        (4, "truncated"),
    ]


def test_a_reward_is_stuck_when_it_is_constant_or_no_group_has_a_spread():
    assert raised_at(settings(), reward=[0.0] * 6) == [(4, "reward_stuck")]
    assert raised_at(settings(), reward=[0.0, 0.0, 0.0, 0.1, 0.1, 0.1]) == []
    moving = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert raised_at(settings(), reward=moving, reward_std=[0.0] * 5) == [(4, "reward_stuck")]
    assert raised_at(settings(), reward=moving, reward_std=[0.0, 0.0, 0.1, 0.0, 0.0]) == []


def test_an_alert_is_raised_where_it_begins_and_again_after_it_has_ceased():
    gap = [0.2, 0.3, 0.05, 0.4]
    assert raised_at(settings(), logprob_gap_mean=gap) == [(1, "logprob_gap"), (4, "logprob_gap")]


def test_the_evaluation_before_training_is_no_step():
    before = {"step": 0, "eval_reward": math.nan}
    assert raised([before], settings()) == []
    steps = [before, *steps_of(entropy=[2.0, 2.0, 0.1, 0.1])]
    assert [alert.name for alert in raised(steps, settings())] == ["entropy_collapse"]


@pytest.mark.parametrize("name", CHECKS)
def test_every_advice_is_about_settings_that_exist(name):
    config = settings()
    for word in CHECKS[name].advice.replace(",", " ").replace(")", " ").split():
        section, _, setting = word.strip("(.;:").partition(".")
        if setting and section in type(config).model_fields:
            assert setting in type(getattr(config, section)).model_fields


def test_an_alert_reaches_terminal_log_and_file_and_is_cut_on_resume(tmp_path):
    config = settings("--run.steps=4", "--trainer.warmup_steps=0", "--run.progress=none")
    terminal = io.StringIO()
    console = Console(file=terminal, width=100)
    with RunDirectory.create(tmp_path / "run", config) as directory:

        def go_on(resume_step, *rewards):
            with (
                logging_to(directory.log, directory.mask, console, level="info"),
                Recorder(directory, config, resume_step=resume_step, console=console, age=0.0) as recorder,
            ):
                for step, loss in enumerate(rewards, start=(resume_step or 0) + 1):
                    recorder.step(step, {"loss": loss})

        go_on(None, 0.5, math.nan)
        line = "step 2: loss is not finite. Lower trainer.lr"
        assert f"warning {line}" in terminal.getvalue()
        assert f"WARNING relax_core.run.recorder: {line}" in directory.log.read_text()
        (alert,) = map(json.loads, directory.alerts.read_text().splitlines())
        assert (alert["step"], alert["name"], alert["message"]) == (2, "not_finite", "loss is not finite")
        go_on(1, 0.4, 0.3)
        assert directory.alerts.read_text() == "", "the lost step's alert went with it"

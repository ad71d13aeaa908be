"""Trackers beside TensorBoard: the endpoint of Prometheus, and stand-ins for services with accounts."""

import logging
import subprocess
import sys
import types
import urllib.request
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from relax_core.config import load_config
from relax_core.run import Recorder, RunDirectory
from relax_core.run.config import RunConfig
from relax_core.run.trackers import TrackedRun, open_tracker, open_trackers, registry
from relax_core.run.trackers.prometheus import PrometheusTracker

KEY = "k" * 40


class Calls(types.ModuleType):
    """A package that remembers how it was called: (name, positional arguments, named arguments)."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call


def _run(tmp_path, *, resumed=False, **settings):
    return TrackedRun(tmp_path / "mine", {"run": {"steps": 4}}, RunConfig(**settings), resumed)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_wandb_gets_the_run_s_name_its_masked_settings_and_every_step(tmp_path, monkeypatch):
    wandb = Calls("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    # A secret in a setting, as it comes with a copied address.
    flags = ["--run.progress=none", "--run.tracker_project=sums", f"--data.hub_subset=https://{KEY}@host"]
    config = load_config("quickstart", flags)
    with RunDirectory.create(tmp_path / "run", config) as directory, Recorder(directory, config) as recorder:
        recorder.step(1, {"reward": 0.25})
    (init, _, options), (log, numbers, where), (finish, *_) = wandb.calls
    assert (init, log, finish) == ("init", "log", "finish")
    assert {key: options[key] for key in ("project", "name", "id", "resume")} == {
        "project": "sums", "name": "run", "id": "run", "resume": "allow",
    }  # fmt: skip
    assert options["config"]["data"]["hub_subset"] == "https://***@host"
    assert numbers[0]["reward/reward"] == 0.25
    assert where == {"step": 1}


@pytest.mark.parametrize(("resumed", "continues"), [(False, False), (True, 0)])
def test_clearml_gets_a_task_and_scalars_by_group_and_name(tmp_path, monkeypatch, resumed, continues):
    clearml, task = Calls("clearml"), Calls("task")
    clearml.Task = task
    monkeypatch.setitem(sys.modules, "clearml", clearml)
    tracker = open_tracker("clearml", _run(tmp_path, resumed=resumed, tracker_project="sums"))
    tracker.log(3, {"loss/sft_loss": 0.5, "time/train": 2.0})
    tracker.close()
    init, connect, get_logger, *scalars, close = task.calls
    assert init[0] == "init"
    assert (init[2]["project_name"], init[2]["task_name"]) == ("sums", "mine")
    assert init[2]["continue_last_task"] is continues
    assert connect == ("connect_configuration", ({"run": {"steps": 4}},), {"name": "relax"})
    assert get_logger[0] == "get_logger"
    assert [(args, options) for _, args, options in scalars] == [
        (("loss", "sft_loss", 0.5), {"iteration": 3}),
        (("time", "train", 2.0), {"iteration": 3}),
    ]
    assert close[0] == "close"


def test_prometheus_scrapes_the_last_step_over_the_loopback_while_the_run_lasts(tmp_path):
    tracker = PrometheusTracker(_run(tmp_path, prometheus_port=0))
    address = f"http://127.0.0.1:{tracker.port}/metrics"
    try:
        tracker.log(1, {"reward/reward": 0.25, "time/train": 2.0})
        tracker.log(2, {"reward/reward": 0.5, "other/odd-name": 7.0})
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
    finally:
        tracker.close()
    # The text format of Prometheus, written out.
    for line in (
        "# TYPE relax_reward gauge",
        'relax_reward{run="mine"} 0.5',
        'relax_step{run="mine"} 2.0',
        'relax_time_train{run="mine"} 2.0',
        'relax_odd_name{run="mine"} 7.0',
    ):
        assert line in text.splitlines()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=60)


def test_the_endpoint_listens_on_the_loopback_alone_unless_it_is_told_otherwise(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert RunConfig().prometheus_host == "127.0.0.1"
    tracker = PrometheusTracker(_run(tmp_path, prometheus_port=0))
    try:
        assert tracker._server.server_address[0] == "127.0.0.1"
        assert f"http://127.0.0.1:{tracker.port}/metrics" in caplog.text
        taken = _run(tmp_path, prometheus_port=tracker.port)
        with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{tracker.port} .*in use"):
            PrometheusTracker(taken)
    finally:
        tracker.close()


@pytest.mark.parametrize("name", ["wandb", "clearml", "prometheus"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"pip install 'relax-core\[{name}\]'"):
        open_tracker(name, _run(tmp_path))


def test_the_commands_name_extras_that_there_are():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(registry._BUILT_IN) <= set(project["optional-dependencies"])


def test_nothing_of_a_tracker_is_imported_before_it_is_opened():
    code = (
        "import sys; import relax_core.run.trackers\n"
        "assert not {'wandb', 'clearml', 'prometheus_client'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Remembering:
    """A tracker of somebody else's."""

    opened: ClassVar = []

    def __init__(self, run):
        self.run, self.logged, self.closed = run, [], False
        Remembering.opened.append(self)

    def log(self, step, numbers):
        self.logged.append((step, dict(numbers)))

    def close(self):
        self.closed = True


@pytest.fixture
def remembering(monkeypatch):
    """An installed package that adds the tracker `mine`; those that were opened."""
    monkeypatch.setattr(Remembering, "opened", [])
    monkeypatch.setitem(sys.modules, "remembering_tracker", types.SimpleNamespace(Remembering=Remembering))
    entry = EntryPoint("mine", "remembering_tracker:Remembering", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (entry,) if group == registry.GROUP else ())
    return Remembering.opened


def test_a_package_adds_a_tracker_by_an_entry_point(tmp_path, remembering):
    run = TrackedRun(tmp_path, {}, RunConfig.model_construct(trackers=("mine",)), False)
    trackers = open_trackers(run)
    trackers[1].log(1, {"loss/loss": 0.5})
    assert remembering[0].logged == [(1, {"loss/loss": 0.5})]
    with pytest.raises(ValueError, match="there is no tracker 'yours'; there is clearml, mine, prometheus"):
        open_tracker("yours", run)


def test_trackers_that_were_opened_are_closed_when_a_later_one_cannot_be(tmp_path, remembering, monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    settings = RunConfig.model_construct(trackers=("mine", "clearml"))
    with pytest.raises(ValueError, match="clearml"):
        open_trackers(TrackedRun(tmp_path, {}, settings, False))
    assert remembering[0].closed

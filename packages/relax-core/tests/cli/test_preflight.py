import pytest
from relax_core.cli.preflight import refuse_unready
from relax_core.cli.train import main
from relax_core.config import ConfigError, load_config
from relax_core.device import UnknownDeviceError, get_device


def refused(*flags):
    with pytest.raises(ConfigError) as caught:
        refuse_unready(load_config("quickstart", flags))
    return {".".join(problem.path): problem for problem in caught.value.problems}


def test_the_quickstart_is_ready():
    refuse_unready(load_config("quickstart"))


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        (("--model.path", "no/such"), "model.path", "no such directory, and nothing is downloaded"),
        (("--model.path", "builtin:no"), "model.path", "does not ship with relax-core"),
        (("--data.path", "no.jsonl"), "data.path", "no file or folder no.jsonl"),
        (("--data.eval_path", "no/*.jsonl"), "data.eval_path", "no file matches the pattern"),
        (("--data.chat_template", "no.jinja"), "data.chat_template", "no such file"),
        (("--reward.function", "no_such:f"), "reward.function", "cannot be imported"),
        (("--reward.function", "maths"), "reward.function", "no reward is called 'maths'"),
        (
            ("--model.reference_path", "no", "--algorithm.kl_loss_coef", "1"),
            "model.reference_path",
            "no such directory",
        ),
    ],
)
def test_what_is_not_there_is_named_by_its_setting(flags, name, words):
    found = refused(*flags)
    assert list(found) == [name]
    assert words in found[name].message
    assert found[name].given == flags[1]


def test_sources_of_a_mixture_that_are_missing_or_one_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    path = ("--data.path", str(rows))
    missing = refused(*path, "--data.mixture", "{no.jsonl: 1.0}")["data.mixture"]
    assert missing.given == "no.jsonl"
    assert "there is no file or folder no.jsonl" in missing.message
    shared = refused(*path, "--data.mixture", f"{{{tmp_path}: 1.0}}")["data.mixture"]
    assert f"rows.jsonl is in {rows} and in {tmp_path}" in shared.message


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(get_device("cuda"), "available", lambda: False)
    found = refused("--run.device", "cuda")
    assert found["run.device"].message.startswith("this machine has no cuda device that works")
    assert found["run.device"].allowed == "auto or cpu"


def test_a_device_whose_package_is_not_installed_is_refused(monkeypatch):
    def missing(name):
        raise UnknownDeviceError(f"device {name!r} is not installed")

    monkeypatch.setattr("relax_core.device.get_device", missing)
    found = refused("--run.device", "npu")
    assert found["run.device"].message == "device 'npu' is not installed"
    assert found["run.device"].allowed == "auto or cpu"


def test_trackers_that_are_asked_for_and_not_installed_are_refused_with_the_command(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr("relax_core.run.trackers.registry.find_spec", lambda name: None)
    found = refused("--run.trackers", "[clearml]")
    assert found["run.trackers"].given == "clearml"
    assert "pip install 'relax-core[clearml]'" in found["run.trackers"].message
    by_key = found[""]
    assert by_key.origin == "WANDB_API_KEY"
    assert "pip install 'relax-core[wandb]'; or unset the key" in by_key.message


def test_all_is_said_at_once_and_nothing_is_left_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model.path", "no/such", "--data.path", "no.jsonl", "--run.name", "mine"]) == 2
    assert "2 problems in the configuration" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

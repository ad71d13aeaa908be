import subprocess
import sys

import pytest
import relax_core.loop
from relax_core.cli.launch import RESUMABLE, run_name
from relax_core.cli.train import main
from relax_core.config import RelaxConfig, load_config
from relax_core.config.fields import field_rows
from relax_core.config.yaml_text import parse_yaml
from relax_core.recipes import read_recipe


@pytest.fixture
def loop(monkeypatch):
    """Stands in for the run loop: records the calls, and does what a test asks for."""
    calls = []

    def run(config, directory, *, resume, interruption):
        calls.append((config, directory.path, resume))
        if resume:
            directory.reopen(config)
        return run.act(config, directory)

    def finish(config, directory):
        directory.write_json(directory.summary, {"steps": config.run.steps})
        return "finished"

    run.act, run.calls = finish, calls
    monkeypatch.setattr(relax_core.loop, "run", run, raising=False)
    return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_arguments_the_quickstart_runs(folder, loop):
    assert main([]) == 0
    ((config, path, resume),) = loop.calls
    assert resume is False
    assert config.run.name == path.name
    assert path.parent.name == "runs"
    assert path.name.startswith("quickstart-2")
    assert config.model_copy(update={"run": config.run.model_copy(update={"name": None})}) == load_config(
        "quickstart"
    )
    assert load_config(str(folder / path / "config.yaml")) == config


def test_dotted_flags_reach_the_loop(folder, loop):
    assert main(["--recipe", "quickstart", "--run.name", "mine", "--trainer.lr", "3e-5"]) == 0
    ((config, path, _),) = loop.calls
    assert str(path) == "runs/mine"
    assert config.trainer.lr == 3e-5


def test_a_run_is_never_started_in_a_directory_that_has_one(folder, loop, capsys):
    assert main(["--run.name", "mine"]) == 0
    before = (folder / "runs/mine/config.yaml").read_bytes()
    assert main(["--run.name", "mine", "--run.steps", "9"]) == 2
    assert "holds a finished run, which is never overwritten" in capsys.readouterr().err
    assert (folder / "runs/mine/config.yaml").read_bytes() == before
    assert len(loop.calls) == 1


def test_an_interrupted_run_says_how_to_go_on(folder, loop, capsys):
    loop.act = lambda config, directory: "interrupted"
    assert main(["--run.name", "mine"]) == 130
    assert "relax-train --resume runs/mine" in capsys.readouterr().err
    assert main(["--resume", "runs/mine", "--run.log_level", "debug"]) == 130
    (first, _, _), (config, path, resume) = loop.calls
    assert resume is True
    assert str(path) == "runs/mine"
    assert config.run.log_level == "debug"
    assert config.trainer == first.trainer
    assert load_config("runs/mine/config.yaml") == config


def test_resuming_keeps_the_course_of_the_run(folder, loop, capsys):
    loop.act = lambda config, directory: "interrupted"
    main(["--run.name", "mine"])
    capsys.readouterr()
    assert main(["--resume", "runs/mine", "--trainer.lr", "1", "--run.seed", "2", "--run.step", "9"]) == 2
    error = capsys.readouterr().err
    assert error.count("cannot change when a run is resumed") == 2
    assert ", ".join(RESUMABLE) in error
    assert "did you mean --run.steps?" in error
    assert len(loop.calls) == 1


def test_a_finished_run_goes_on_only_with_more_steps(folder, loop, capsys):
    main(["--run.name", "mine", "--run.steps", "6"])
    assert main(["--resume", "runs/mine"]) == 2
    assert "holds a finished run of 6 steps: nothing is left to do" in capsys.readouterr().err
    assert main(["--resume", "runs/mine", "--run.steps", "7"]) == 0
    assert loop.calls[-1][0].run.steps == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--resume", "runs/x", "--recipe", "quickstart"], "a resumed run has its recipe already"),
        (["--recipe", "quikstart"], "did you mean quickstart?"),
        (["--recipe", "no/such.yaml"], "there is no such recipe file"),
        (["--run.dir", "/proc/none"], "cannot write /proc/none"),
        (["--run.steps"], "the flag needs a value"),
        (["train"], "a value without a flag"),
    ],
)
def test_refusals_are_readable_and_have_code_2(folder, loop, capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("relax-train: ")
    assert "Traceback" not in error
    assert loop.calls == []


def test_a_damaged_config_of_a_run_is_named(folder, loop, capsys):
    main(["--run.name", "mine"])
    (folder / "runs/mine/config.yaml").write_text("run: [")
    assert main(["--resume", "runs/mine"]) == 2
    assert "runs/mine/config.yaml cannot be read: line 1" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_what_the_loop_refuses_is_said_in_a_line_and_traced_in_the_log(folder, loop, capsys, error):
    def refuse(config, directory):
        raise error("checkpoint step_3 is cut in half")

    loop.act = refuse
    assert main(["--run.name", "mine"]) == 1
    shown = capsys.readouterr().err
    assert "error checkpoint step_3 is cut in half" in shown
    assert "The traceback is in runs/mine/log.txt" in shown
    assert "Traceback" not in shown
    assert "Traceback" in (folder / "runs/mine/log.txt").read_text()


def test_an_interrupt_at_once_says_how_to_go_on_and_nothing_of_a_report(folder, loop, capsys):
    def interrupt(config, directory):
        raise KeyboardInterrupt

    loop.act = interrupt
    assert main(["--run.name", "mine", "--run.progress", "none"]) == 130
    assert capsys.readouterr().err == "Interrupted. Go on with: relax-train --resume runs/mine\n"


def test_a_defect_is_logged_and_not_hidden(folder, loop):
    def crash(config, directory):
        raise KeyError("defect")

    loop.act = crash
    with pytest.raises(KeyError):
        main(["--run.name", "mine"])
    assert "KeyError: 'defect'" in (folder / "runs/mine/log.txt").read_text()


def test_the_directory_is_free_again_after_a_failure(folder, loop):
    def refuse(config, directory):
        raise ValueError("no")

    finish, loop.act = loop.act, refuse
    assert main(["--run.name", "mine"]) == 1
    loop.act = finish
    assert main(["--resume", "runs/mine"]) == 0


def test_a_finished_run_has_its_report(folder, loop, capsys):
    def act(config, directory):
        directory.metrics.write_text('{"step": 1, "reward": 0.5}\n')
        summary = {"steps": 1, "eval_metric": "accuracy", "eval_before": 0.25, "eval_after": 0.75}
        directory.write_json(directory.summary, summary)
        return "finished"

    loop.act = act
    assert main(["--run.name", "mine"]) == 0
    assert capsys.readouterr().err == (
        "runs/mine: loading torch, megatron-core and the model ...\n"
        "Held-out accuracy: 0.25 before, 0.75 after\nFinished: runs/mine; open runs/mine/report.html\n"
    )
    assert "<!doctype html>" in (folder / "runs/mine/report.html").read_text()


def test_dry_run_prints_the_resolved_config_and_leaves_nothing(folder, loop, capsys):
    assert main(["--dry-run", "--run.steps", "7"]) == 0
    (folder / "out.yaml").write_text(capsys.readouterr().out)
    assert load_config(str(folder / "out.yaml")) == load_config("quickstart", ["--run.steps", "7"])
    assert [entry.name for entry in folder.iterdir()] == ["out.yaml"]
    assert loop.calls == []


def test_dry_run_masks_secrets(folder, capsys, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    main(["--dry-run", "--data.path", "/x/very-secret"])
    assert parse_yaml(capsys.readouterr().out)[0]["data"]["path"] == "/x/***"


def test_help_explains_every_field_with_unit_and_default(capsys):
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for row in field_rows(RelaxConfig):
        assert f"--{row.name} {row.kind}" in shown
        assert " ".join(row.doc.split()) in shown
    sets = read_recipe("quickstart").values
    longest = sets["rollout"]["max_new_tokens"]
    assert f"--rollout.max_new_tokens INTEGER (default 1024, quickstart sets {longest})" in shown
    assert "Length at which a completion is cut. [tokens] An integer, at least 1." in shown
    assert f"--data.path TEXT (required, quickstart sets {sets['data']['path']})" in shown


def test_help_shows_what_the_users_recipe_sets(folder, capsys):
    (folder / "mine.yaml").write_text("trainer: {lr: 1e-2}\n")
    assert main(["--help", "--recipe", "./mine.yaml"]) == 0
    assert "--trainer.lr NUMBER   (default 1e-06, mine sets 0.01)" in capsys.readouterr().out


def test_recipes_are_listed_with_what_they_do(capsys):
    assert main(["--list-recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("quickstart ") and len(line.split()) > 5 for line in lines)
    assert any(line.startswith("quickstart-sft ") for line in lines)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"relax-train {relax_core.__version__}\n"


def test_the_doctor_shows_versions_devices_and_corrections(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert main(["--doctor"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "relax-core",
        "megatron-core",
        "torch",
        "cpu ",
        "cuda ",
        "npu ",
        "Corrections of upstream packages (",
    ):
        assert words in shown
    assert "hf_very_secret" not in shown
    from relax_core.upstream import list_corrections

    for correction in list_corrections():
        assert correction.name in shown


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--list-recipes"], ["--dry-run"], ["--version"], ["--lr", "1"]],
    ids=lambda arguments: arguments[0],
)
def test_nothing_slow_is_imported_before_a_run_starts(arguments):
    code = (
        "import sys; from relax_core.cli.train import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'ray', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("recipe", "start"),
    [("quickstart", "quickstart-2"), ("a/b/my recipe.yaml", "my-recipe-2"), ("./.yaml", "yaml-2")],
)
def test_a_run_without_a_name_is_called_after_its_recipe(recipe, start):
    import time

    assert run_name(recipe, time.localtime()).startswith(start)

"""`torchrun -m relax_core`: the ranks train one model, the first one speaks and writes."""

import json
import os
import subprocess
import sys

import pytest
from relax_core.cli.launched import with_launched_ranks
from relax_core.cli.preflight import refuse_unready
from relax_core.cli.train import main
from relax_core.config.load import load_config
from relax_core.config.problems import ConfigError
from relax_core.config.yaml_text import dump_config
from relax_core.loop import run
from relax_core.run import RunDirectory

# One rank's sums are added in another order on two.
REL = 2e-4


def torchrun(*arguments):
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "relax_core")
    # The sources under test, and the user's reward.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=900, check=False, env=env
    )


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


def same(two, one):
    assert [line.keys() for line in two] == [line.keys() for line in one]
    names = ("step", "reward", "loss", "entropy", "grad_norm", "eval_reward", "eval_loss")
    for mine, theirs in zip(two, one, strict=True):
        wanted = {name: theirs[name] for name in names if name in theirs}
        assert {name: mine[name] for name in wanted} == pytest.approx(wanted, rel=REL)


@pytest.fixture
def two_ranks(small_run, tmp_path):
    """(flags that run a config on two ranks, where it ran, where one rank ran it in this process)."""

    def start(steps, **sections):
        changes = {"steps": steps, "dir": str(tmp_path), "progress": "plain"}
        config = small_run(run={**changes, "name": "one"}, checkpoint={"every": 1}, **sections)
        with RunDirectory.create(tmp_path / "one", config) as directory:
            assert run(config, directory, resume=False) == "finished"
        (tmp_path / "recipe.yaml").write_text(dump_config(config))
        flags = ("--recipe", str(tmp_path / "recipe.yaml"), "--run.name", "two")
        return flags, tmp_path / "two", tmp_path / "one"

    return start


def test_reinforcement_learning_on_two_replicas_goes_on_with_one_model_over_both(two_ranks):
    """The checkpoint was written behind the training."""
    flags, two, one = two_ranks(3, eval={"before": False, "after": False})
    done = torchrun(*flags, "--run.steps", "2", "--checkpoint.asynchronous")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 2/2") == 1, "one rank alone shows progress"
    layout = ("--parallel.tensor", "2", "--parallel.sequence")
    again = torchrun("--resume", str(two), "--run.steps", "3", *layout)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("another layout, equal to rounding and not to the bit: parallel.tensor: 1") == 1
    same(metrics(two), metrics(one))
    assert json.loads((two / "summary.json").read_text())["steps"] == 3
    assert {path.name for path in (two / "hf").iterdir()} == {path.name for path in (one / "hf").iterdir()}


def test_supervised_fine_tuning_on_one_model_over_two_ranks(two_ranks, tmp_path):
    rows = [{"prompt": f"{i} plus {i}", "completion": str(2 * i)} for i in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "eval_path": None, "eval_fraction": 0.2}
    flags, two, one = two_ranks(2, algorithm={"name": "sft"}, sft={"samples_per_step": 8}, data=data)
    watched = ("--run.trace", "--run.profile_from", "2")
    done = torchrun(*flags, "--parallel.tensor", "2", "--parallel.sequence", *watched)
    assert done.returncode == 0, done.stderr
    same(metrics(two), metrics(one))
    assert {file.name for file in (two / "profile").iterdir()} == {"step_2_rank0.json", "step_2_rank1.json"}
    events = json.loads((two / "trace.json").read_text())
    (other,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "rank 1")
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "train"]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == other and e["name"] == "train policy"]
    assert len(phases) == len(steps) == 2
    for phase, step in zip(phases, steps, strict=True):
        # The ranks wait for one another in every step.
        assert step["ts"] <= phase["ts"] + phase["dur"]
        assert step["ts"] + step["dur"] >= phase["ts"]


def test_a_rank_beside_the_first_says_nothing_and_lets_it_speak(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("relax_core.cli.launched.time.sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["--no.such", "1"]) == 2
    assert main(["--help"]) == 0
    assert (*capsys.readouterr(), waited) == ("", "", [10.0])


def test_the_launchers_ranks_are_those_of_the_run_unless_flags_say_so(monkeypatch):
    assert with_launched_ranks(["--run.steps", "2"]) == ["--run.steps", "2"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    added = ["--cluster.mode", "torchrun", "--cluster.trainer_ranks", "4"]
    assert with_launched_ranks(["--run.steps", "2"]) == ["--run.steps", "2", *added]
    given = ["--cluster.mode=torchrun", "--cluster.trainer_ranks", "2"]
    assert with_launched_ranks(given) == given


TWO = ("--cluster.mode", "torchrun", "--cluster.trainer_ranks", "2")


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (2, (), "a launcher started 2 processes"),
        (
            1,
            ("--cluster.mode", "torchrun", "--cluster.trainer_ranks", "2"),
            "no launcher started this process",
        ),
        (4, TWO, "a launcher started 4 processes"),
    ],
)
def test_other_numbers_of_processes_than_the_run_has_are_refused(monkeypatch, ranks, flags, words):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=words):
        refuse_unready(load_config("quickstart", flags))

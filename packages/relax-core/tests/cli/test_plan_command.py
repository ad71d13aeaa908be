import json
import subprocess
import sys
from pathlib import Path

import pytest
from relax_core.cli.preflight import refuse_unready
from relax_core.cli.train import main
from relax_core.config import ConfigError, load_config

NPU = "qwen35-9b-mtp-8xnpu-thd"


def test_a_plan_is_printed_and_drawn(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["--plan", "--recipe", NPU, "--plan-page", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Plan of {NPU} on 8 x 910c-die")
    assert "Memory, GiB" in text
    assert "<svg" in page.read_text()


def test_a_refused_plan_ends_with_2_and_says_what_works(capsys):
    assert main(["--plan", "--json", "--recipe", NPU, "--sglang.memory_fraction", "0.6"]) == 2
    values = json.loads(capsys.readouterr().out)
    (problem,) = values["problems"]
    assert problem["field"] == "sglang.memory_fraction"
    assert problem["given"] == "0.6"
    assert f"at most {problem['nearest']}" in problem["allowed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "belongs to --plan"),
        (["--plan-device", "h200"], "belongs to --plan"),
        (["--plan", "--resume", "runs/a"], "planned before it starts"),
        (["--plan", "--plan-device", "h300"], "it has h200, h100, a100, 910c-die"),
        (["--plan", "--recipe", NPU, "--model.path", "Qwen/Qwen3.5-9C"], "did you mean Qwen3.5-9B?"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "it holds a list, not names and values"),
        (b"3", "it holds a int, not names and values"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "can't decode byte"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b'{"model_type": "llama"}', "model_type is 'llama'"),
        (b'{"model_type": ["qwen3_5"], "text_config": []}', "model_type is ['qwen3_5']"),
        (b'{"model_type": "qwen3_5", "text_config": []}', "must be positive integers"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_in_words(capsys, tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    assert main(["--plan", "--recipe", NPU, "--model.path", str(tmp_path)]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "model.path = " in text
    assert words in text


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("teacher.path", ["--algorithm.name", "on_policy_distillation"]),
        ("model.reference_path", ["--algorithm.kl_loss_coef", "0.1"]),
        ("critic.path", ["--algorithm.name", "ppo"]),
    ],
)
def test_a_further_model_that_cannot_be_read_is_refused_by_its_own_field(capsys, field, flags):
    assert main(["--plan", "--recipe", "math-rl", *flags, f"--{field}", "nowhere/Qwen3.5-9C"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"1 problem in the configuration {field} = nowhere/Qwen3.5-9C" in text
    assert "did you mean Qwen3.5-9B?" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_plan_that_cannot_be_printed_says_so_and_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "relax_core", "--plan", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 2
    assert "the output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=120) == 0


@pytest.mark.parametrize("page", ["nowhere/plan.html", "."])
def test_a_page_that_cannot_be_written_is_refused_by_its_path(capsys, tmp_path, page):
    assert main(["--plan", "--plan-page", str(tmp_path / page)]) == 2
    assert f"cannot write {tmp_path / page}" in " ".join(capsys.readouterr().err.split())


def test_a_launch_runs_the_same_checks_first():
    with pytest.raises(ConfigError) as caught:
        refuse_unready(load_config("quickstart", ["--mtp.layers", "3"]))
    assert [".".join(problem.path) for problem in caught.value.problems] == ["mtp.init"]


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("quickstart", [], "weights stay in the process, of which the engine is a part"),
        ("quickstart", ["--rollout.engine", "sglang"], "by ipc: trainer and servers share this host"),
        ("quickstart",
         ["--cluster.mode", "ray", "--rollout.update_path", "disk", "--rollout.update_folder", "/w"],
         "weights travel by disk, as asked for: files in /w"),
        (NPU, ["--rollout.update_path", "host"], "weights travel by host, as asked for"),
        (NPU, [], "weights travel by ipc: engines and ranks are on the same devices"),
        (NPU, ["--cluster.placement", "async", "--cluster.address", "head:6379"],
         "weights travel by ipc, else broadcast: a run finds out whether Ray puts all on one host"),
    ],
)  # fmt: skip
def test_a_plan_says_how_weights_will_travel_and_why(capsys, recipe, flags, words):
    main(["--plan", "--recipe", recipe, *flags])
    assert words in " ".join(capsys.readouterr().out.split())

"""Each command of `relax-npu integration` is real: docker's options, and what runs inside on our own CLIs.

The whole run is carried out with a docker of ours on a machine of folders: it takes the options that docker
has and looks for what is mounted.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from relax_npu import cli, commands, smoke
from relax_npu.doctor import Machine

DIES = [0, 1, 2, 3]


def docker() -> argparse.ArgumentParser:
    """The options of `docker buildx build` and `docker run` of docker's reference that are in use."""
    parser = argparse.ArgumentParser("docker", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    buildx = actions.add_parser("buildx", allow_abbrev=False).add_subparsers(dest="action", required=True)
    build = buildx.add_parser("build", allow_abbrev=False)
    build.add_argument("--load", action="store_true")
    for name in ("--file", "--tag"):
        build.add_argument(name, required=True)
    for name in ("--build-arg", "--secret"):
        build.add_argument(name, action="append", default=[])
    build.add_argument("context")
    run = actions.add_parser("run", allow_abbrev=False)
    for name in ("--rm", "--init", "--interactive", "--tty"):
        run.add_argument(name, action="store_true")
    for name in ("--network", "--shm-size"):
        run.add_argument(name)
    for name in ("--device", "--volume", "--env", "--group-add", "--mount"):
        run.add_argument(name, action="append", default=[])
    run.add_argument("image")
    run.add_argument("command", nargs=argparse.REMAINDER)
    return parser


@pytest.fixture
def steps(root: Path) -> tuple[commands.Step, ...]:
    return commands.integration(DIES, "relax-npu:local", root=root)


def inside(steps: tuple[commands.Step, ...]) -> list[list[str]]:
    """What the containers run."""
    return [docker().parse_args(step.command[1:]).command for step in steps[1:]]


def test_docker_takes_every_option(steps, root: Path) -> None:
    build, *runs = (docker().parse_args(step.command[1:]) for step in steps)
    assert (build.action, build.load) == ("build", True)
    assert (root / build.context / build.file).is_file()
    for run in runs:
        assert (run.action, run.rm, run.network, run.shm_size) == ("run", True, "host", "200g")
        assert run.device[:4] == [f"/dev/davinci{die}" for die in DIES]
        assert set(run.device[4:]) == {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
        for volume in run.volume:
            source, target, mode = volume.split(":")
            assert (source.startswith("/"), target.startswith("/"), mode) == (True, True, "ro")
        assert run.image == build.tag
        assert run.command


def test_the_build_arguments_are_those_of_the_dockerfile(steps, root: Path) -> None:
    given = {text.partition("=")[0] for text in docker().parse_args(steps[0].command[1:]).build_arg}
    text = (root / "docker/Dockerfile.npu").read_text()
    declared = {line.split()[1].partition("=")[0] for line in text.splitlines() if line.startswith("ARG ")}
    assert given == declared


def test_the_doctor_of_the_image_is_ours(steps) -> None:
    program, *arguments = inside(steps)[0]
    assert program == "relax-npu"
    assert cli._parser().parse_args(arguments).run is cli._doctor


def test_the_parity_suite_takes_its_arguments(steps) -> None:
    """On this machine `ascend` is not there: it says so, and not that it does not know an argument."""
    command = inside(steps)[1]
    assert command[:3] == ["python3", "-m", "relax_kernels"]
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "unrecognized arguments" not in done.stderr
    assert "ascend" in done.stderr + done.stdout


def test_the_smoke_step_takes_its_arguments(steps, monkeypatch) -> None:
    command = inside(steps)[2]
    assert command[:3] == ["python3", "-m", "relax_npu.smoke"]
    started = []
    monkeypatch.setattr(
        smoke.subprocess,
        "run",
        lambda command, check: started.append(command) or subprocess.CompletedProcess(command, 0),
    )
    assert smoke.main(command[3:]) == 0
    (launched,) = started
    assert launched[1:] == shlex.split(
        "-m torch.distributed.run --nproc-per-node 4 -m relax_npu.smoke --dies 4 --rank"
    )


def test_the_contract_suite_is_found_and_has_tests_of_sglang(steps, root: Path) -> None:
    run = docker().parse_args(steps[4].command[1:])
    mounted = dict(volume.split(":")[1::-1] for volume in run.volume)
    assert mounted["/src/tests"] == str(root)
    command = [word.replace("/src/tests", str(root)) for word in run.command]
    variables = dict(pair.split("=") for pair in run.env)
    assert variables["RELAX_TEST_DEVICE"] == "npu"
    done = subprocess.run(
        [sys.executable, *command[1:], "--collect-only", "-q"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) > 20
    assert all("sglang" in line for line in collected)


def test_the_image_has_what_the_contract_suites_configuration_asks_for(root: Path) -> None:
    text = (root / "docker/Dockerfile.npu").read_text()
    for package in ("pytest>=", "pytest-timeout>=", "hypothesis>="):
        assert f'"{package}' in text, "pytest refuses an option of a plugin that is not there"


FAKE = """\
    #!{python}
    import json, os, pathlib, sys
    sys.path.insert(0, {tests!r})
    from test_npu_integration import docker
    told = docker().parse_args(sys.argv[1:])
    with open({log!r}, "a") as file:
        file.write(json.dumps(told.command if told.action == "run" else [told.action]) + "\\n")
    machine = pathlib.Path({machine!r})
    places = [v.split(":")[0] for v in getattr(told, "volume", [])] + getattr(told, "device", [])
    lost = [p for p in places if not (machine / p.lstrip("/")).exists() and not os.path.exists(p)]
    sys.exit(f"not there: {{lost}}" if lost else int({fails!r} in sys.argv))
"""


@pytest.mark.parametrize("fails", ["", "relax_npu.smoke"])
def test_the_whole_run_with_a_docker_of_ours(
    tmp_path: Path, monkeypatch, root: Path, capfd, fails: str
) -> None:
    machine = tmp_path / "machine"
    for path in (
        *(f"dev/davinci{die}" for die in DIES),
        *("dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc", "usr/local/dcmi", "usr/local/bin/npu-smi"),
        *("usr/local/Ascend/driver", "etc/ascend_install.info", "usr/bin/docker"),
    ):
        (machine / path).parent.mkdir(parents=True, exist_ok=True)
        (machine / path).touch()
    log, program = tmp_path / "log", tmp_path / "bin" / "docker"
    program.parent.mkdir()
    source = FAKE.format(
        python=sys.executable,
        tests=str(Path(__file__).parent),
        log=str(log),
        machine=str(machine),
        fails=fails,
    )
    program.write_text(textwrap.dedent(source))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(root)
    code = cli.main(["integration"], Machine(root=machine, environment={"PATH": "/usr/bin"}))
    ran = [json.loads(line) for line in log.read_text().splitlines()]
    names = ["build", "relax-npu", "relax_kernels", "relax_npu.smoke", "pytest"]
    told = [next(name for name in names if name in command) for command in ran]
    if fails:
        assert code == 1
        assert told == names[:4], "it goes on behind a step that failed"
        assert "one training step with a 9B model's shapes ended with 1" in capfd.readouterr().err
    else:
        assert code == 0
        assert told == names

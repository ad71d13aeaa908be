"""The commands for people: environment, schemas, image, integration; on machines with and without NPUs."""

import os
import shlex
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from relax_npu import cli, commands
from relax_npu.commands import missing
from relax_npu.doctor import Machine
from relax_npu.recipe import shares_dies


@pytest.fixture
def equipped(tmp_path: Path) -> Machine:
    """A machine with two dies, a driver and docker."""
    for path in (
        *("dev/davinci0", "dev/davinci1", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"),
        *("usr/local/dcmi", "usr/local/bin/npu-smi", "usr/local/Ascend/driver", "etc/ascend_install.info"),
        "usr/bin/docker",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return Machine(root=tmp_path, environment={"PATH": "/usr/bin"})


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, environment={"PATH": "/usr/bin"})


def test_the_environment_of_a_shared_die(capsys) -> None:
    assert cli.main(["env", "--dies", "0,1", "--colocate"]) == 0
    told = dict(line.removeprefix("export ").split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert told["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    assert told["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
    assert told["HCCL_NPU_SOCKET_PORT_RANGE"] == told["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    assert told["SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"] == "1"
    assert "SGLANG_ENABLE_SPEC_V2" not in told, "SGLang 0.5.15 has it no more"


def test_the_environment_of_dies_of_ones_own(capsys) -> None:
    cli.main(["env", "--dies", "0"])
    told = capsys.readouterr().out
    assert "expandable_segments:True" in told
    assert "SOCKET_PORT_RANGE" not in told


@pytest.fixture
def core(monkeypatch):
    """relax-core as far as recipes are read; `core.config` is what every recipe says."""
    config = SimpleNamespace(
        run=SimpleNamespace(device="npu"),
        rollout=SimpleNamespace(engine="sglang"),
        cluster=SimpleNamespace(mode="ray", placement="colocate"),
        algorithm=SimpleNamespace(algorithm=SimpleNamespace(loop="rl")),
    )

    def load_config(spec: str) -> SimpleNamespace:
        if spec == "gone":
            raise ValueError("there is no recipe gone")
        return config

    for name in ("relax_core", "relax_core.config", "relax_core.config.load"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["relax_core.config.load"].load_config = load_config
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("section", "name", "value", "shared"),
    [
        ("cluster", "placement", "colocate", True),
        ("cluster", "placement", "hybrid", True),
        ("cluster", "placement", "async", False),
        ("cluster", "mode", "torchrun", True),
        ("rollout", "engine", "transformers", True),
    ],
)
def test_the_environment_of_a_recipe(core, capsys, section, name, value, shared: bool) -> None:
    setattr(getattr(core.config, section), name, value)
    assert cli.main(["env", "--dies", "0,1", "--recipe", "mine"]) == 0
    told = capsys.readouterr().out
    cli.main(["env", "--dies", "0,1", *(["--colocate"] if shared else [])])
    assert told == capsys.readouterr().out


def test_a_recipe_without_an_engine_of_its_own_shares_nothing(core) -> None:
    core.config.cluster.mode, core.config.rollout.engine = "inline", "transformers"
    assert not shares_dies("mine")
    core.config.cluster.mode, core.config.algorithm.algorithm.loop = "ray", "sft"
    assert not shares_dies("mine")


def test_recipes_that_have_no_environment_here(core, capsys) -> None:
    assert cli.main(["env", "--dies", "0", "--recipe", "gone"]) == 2
    core.config.run.device = "cuda"
    assert cli.main(["env", "--dies", "0", "--recipe", "mine"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "there is no recipe gone" in told.err
    assert "mine is for cuda; set run.device to npu" in told.err
    with pytest.raises(SystemExit):
        cli.main(["env", "--dies", "0", "--recipe", "mine", "--colocate"])


def test_recipes_are_relax_cores(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "relax_core.config.load", None)
    assert cli.main(["env", "--dies", "0", "--recipe", "mine"]) == 2
    assert "relax-core, which is not installed; give --colocate" in capsys.readouterr().err


def test_dies_in_a_wrong_order_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["env", "--dies", "1,0"])
    assert "--dies" in capsys.readouterr().err


def test_the_schemas_say_where_they_hold(capsys) -> None:
    assert cli.main(["schema"]) == 0
    told = capsys.readouterr().out
    assert "npu_causal_conv1d_bwd: fla_npu v26.6.0\n" in told
    assert "npu_rms_norm: torch_npu 2.9.0.post4, torch_npu 2.9.0.post9\n" in told
    assert "    npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)" in told


@pytest.fixture(autouse=True)
def repository(monkeypatch) -> Path:
    """The commands are given in the repository's root."""
    root = Path(__file__).resolve().parents[3]
    monkeypatch.chdir(root)
    return root


def test_a_machine_without_an_npu_is_told_what_it_lacks(bare: Machine, capsys) -> None:
    assert cli.main(["integration"], bare) == 1
    told = capsys.readouterr()
    assert told.out == ""
    for text in ("no /dev/davinci<n>", "/dev/devmm_svm is not there", "docker is not on PATH", "--dry-run"):
        assert text in told.err


def test_a_dry_run_shows_every_command_anywhere(bare: Machine, capsys) -> None:
    assert cli.main(["integration", "--dry-run"], bare) == 0
    told = capsys.readouterr().out
    for text in (
        "docker buildx build --load --file docker/Dockerfile.npu",
        "doctor",
        "relax_kernels check",
        "relax_npu.smoke",
    ):
        assert text in told
    assert cli.main(["integration", "--dry-run", "--built"], bare) == 0
    assert "docker buildx" not in capsys.readouterr().out


def test_npu_smi_may_lie_in_another_folder(equipped: Machine, tmp_path: Path, capsys) -> None:
    other = tmp_path / "usr/local/sbin/npu-smi"
    other.parent.mkdir(parents=True)
    (tmp_path / "usr/local/bin/npu-smi").rename(other)
    assert missing(equipped) == []
    cli.main(["image", "check", "--dry-run"], equipped)
    assert "--volume /usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi:ro" in capsys.readouterr().out


def test_a_die_that_is_not_there_is_refused(equipped: Machine, capsys) -> None:
    assert cli.main(["image", "check", "--dies", "0,7"], equipped) == 1
    assert "/dev/davinci7 is not there: dies are [0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["image", "build"], ["integration"]])
def test_outside_of_the_repository_nothing_is_built(equipped, tmp_path, monkeypatch, capsys, command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.child, "run", lambda command: pytest.fail("it ran"))
    assert cli.main(command, equipped) == 1
    assert "has no docker/Dockerfile.npu: run this in the root of" in capsys.readouterr().err


def test_pips_configuration_is_given_as_a_secret(equipped, tmp_path: Path, capsys) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\n")
    assert cli.main(["image", "build", "--dry-run", "--pip-config", str(config)], equipped) == 0
    assert f"--secret id=pipconf,src={config}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["image", "build", "--pip-config", str(tmp_path / "gone")], equipped)


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_command_keeps_options_of_its_own(equipped: Machine, capsys, dashes: list[str]) -> None:
    command = ["python3", "-m", "relax_kernels", "check", "--backend", "ascend"]
    assert cli.main(["image", "run", "--dry-run", *dashes, *command], equipped) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{commands.IMAGE} {' '.join(command)}")


@pytest.mark.parametrize(
    ("dies", "told"),
    [
        ("1,0", "the ids do not ascend"),
        ("0,0", "an id is there twice"),
        ("0, 1", "' 1' is not a device id"),
        ("00", "'00' is not a device id"),
        ("", "no die is given"),
        ("all", "'all' is not a device id"),
    ],
)
def test_dies_that_make_no_sense(capsys, dies: str, told: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["env", f"--dies={dies}"])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("image", ["", "a b", "-x", "Upper", "a//b", "a:"])
def test_an_image_that_has_no_such_name(capsys, image: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["image", "build", "--dry-run", f"--image={image}"])
    assert "is no name of an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    "image", ["relax-npu:local", "quay.io/a/b:1.2-x", "localhost:5000/relax", "a@sha256:0f"]
)
def test_names_of_images(capsys, image: str) -> None:
    assert cli.main(["image", "build", "--dry-run", "--image", image]) == 0
    assert f"--tag {image} " in capsys.readouterr().out


def test_commands_run_in_order_and_stop_at_the_first_that_fails(equipped, monkeypatch, capsys) -> None:
    ran = []

    def run(command):
        ran.append(command)
        return 7 if len(ran) == 2 else 0

    monkeypatch.setattr(cli.child, "run", run)
    assert missing(equipped) == []
    assert cli.main(["image", "check"], equipped) == 7
    assert len(ran) == 2
    assert ran[0][-2:] == ("relax-npu", "doctor")
    assert {"/dev/davinci0", "/dev/davinci1"} <= set(ran[1])
    assert "ended with 7" in capsys.readouterr().err


def test_a_command_of_ones_own_runs_on_chosen_dies(equipped, capsys) -> None:
    assert cli.main(["image", "run", "--dies", "1", "--dry-run", "npu-smi", "info"], equipped) == 0
    told = capsys.readouterr().out
    assert told.rstrip().endswith("relax-npu:local npu-smi info")
    assert "davinci0" not in told


def test_a_container_is_in_the_groups_of_the_device_files(equipped, monkeypatch) -> None:
    """The driver gives them to a group of the host, in which the image's user is not."""
    usual, owners = Path.stat, {"davinci0": 1001, "davinci_manager": 1002, "davinci1": 1003, "hisi_hdc": 0}

    def stat(path: Path, **options) -> os.stat_result:
        found = usual(path, **options)
        return os.stat_result((*found[:5], owners.get(path.name, 1001), *found[6:]))

    monkeypatch.setattr(Path, "stat", stat)
    told = shlex.join(commands.run([0], "true", machine=equipped).command)
    assert "--group-add 1001 --group-add 1002" in told
    assert told.count("--group-add") == 2, "neither root's group nor that of a die that is not passed on"


def test_a_person_types_into_what_runs(equipped, monkeypatch, capsys) -> None:
    assert "--tty" not in commands.run([0], "bash", machine=equipped).command
    for stream in (cli.sys.stdin, cli.sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert cli.main(["image", "run", "--dry-run"], equipped) == 0
    assert "--interactive --tty" in capsys.readouterr().out


def test_folders_of_the_host_are_there_under_their_own_paths(equipped, tmp_path: Path, capsys) -> None:
    models, runs = tmp_path / "my models: 9B", tmp_path / "runs"
    for folder in (models, runs):
        folder.mkdir()
    given = [
        "image",
        "run",
        "--dry-run",
        "--mount",
        str(models),
        "--mount",
        str(runs),
        "relax-train",
        "--plan",
    ]
    assert cli.main(given, equipped) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    for folder in (models, runs):
        place = words.index(f"type=bind,source={folder},target={folder}")
        assert words[place - 1] == "--mount"
        assert place < words.index("relax-npu:local")
    assert words[-2:] == ["relax-train", "--plan"]


@pytest.mark.parametrize("name", ["gone", "a,b"])
def test_what_cannot_be_mounted_is_refused(equipped, tmp_path: Path, capsys, name: str) -> None:
    (tmp_path / "a,b").mkdir()
    with pytest.raises(SystemExit):
        cli.main(["image", "run", "--mount", str(tmp_path / name)], equipped)
    assert f"{name} is no folder, or has a comma" in capsys.readouterr().err


def test_without_docker_no_image_is_built(bare: Machine, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli.child, "run", lambda command: pytest.fail("it ran"))
    assert cli.main(["image", "build"], bare) == 1
    assert "docker is not on PATH" in capsys.readouterr().err


def test_an_interrupted_command_ends_without_a_trace(equipped, monkeypatch) -> None:
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.child, "run", interrupted)
    assert cli.main(["image", "check"], equipped) == 130

"""The Dockerfile, read: every pin, non-interactive, in order, without secrets, as another user."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from relax_npu.pins import build_arguments, load_pins

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docker/Dockerfile.npu").read_text()
# Comments, also those between the lines of one command, are dropped; continued lines are joined.
LINES = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", TEXT)).splitlines()
COMMANDS = [re.sub(r"\s+", " ", line).strip() for line in LINES if line.strip()]
RUNS = [command for command in COMMANDS if command.startswith("RUN ")]
ENTRY = ROOT / "docker/npu-entry.sh"


def place(text: str) -> int:
    """Where a piece of text first stands."""
    (first, *_) = [number for number, command in enumerate(COMMANDS) if text in command]
    return first


def interactive(command: str) -> list[str]:
    """The installations of a command that would ask."""
    found = re.findall(r"\bapt(?:-get)? (?:[^&|;]*\s)?install\b[^&|;]*", command)
    return [one for one in found if not re.search(r"\s(-y|--yes)\b", one)]


def test_no_installation_asks() -> None:
    assert any("apt-get install" in command for command in RUNS)
    assert not [one for command in RUNS for one in interactive(command)]


def test_what_aborted_the_reference_systems_build_is_found() -> None:
    """Review of the reference system, finding 4: `apt install gawk` waited for an answer."""
    assert interactive("RUN apt update && apt install gawk && make")
    assert interactive("RUN apt-get install --no-install-recommends gawk")
    assert not interactive("RUN apt-get update && apt-get install -y gawk")


def test_every_pin_is_an_argument_with_its_value() -> None:
    declared: dict[str, set[str]] = {}
    for name, value in re.findall(r"(?m)^ARG (\w+)=(.*)$", TEXT):
        declared.setdefault(name, set()).add(value)
    assert declared == {name: {value} for name, value in build_arguments(load_pins()).items()}


def test_no_version_stands_outside_of_the_arguments() -> None:
    for command in RUNS:
        assert not re.findall(r"==\d", command), command


def test_sources_are_taken_by_commit() -> None:
    for name in ("FLA_NPU", "SGL_KERNEL_NPU", "MINDSPEED"):
        assert re.search(rf'checkout --detach "\$\{{{name}_REF\}}"', TEXT), name
    for name, source in load_pins().sources.items():
        assert name == "sglang" or re.fullmatch("[0-9a-f]{40}", source.commit)


def test_the_order_of_the_steps() -> None:
    order = [
        "apt-get install",
        '"torch-npu==',
        "/opt/triton-ascend/${wheel}",
        "pip wheel",
        "build.sh -a kernels",
        "/src/mindspeed checkout",
        "[srt_npu]",
        "/wheels/*.whl",
        "/src/relax/packages/relax-core",
        "relax_kernels check",
        "USER 10001",
        "ENTRYPOINT",
    ]
    places = [place(text) for text in order]
    assert places == sorted(places)


def stages() -> list[list[str]]:
    """The commands of each stage; what a stage begins with comes first."""
    found: list[list[str]] = []
    for command in COMMANDS:
        if command.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(command)
    return found


def test_builds_find_what_they_import() -> None:
    """fla_npu stops without one of these; sgl-kernel-npu imports them in its CMake files."""
    before = " ".join(COMMANDS[: place("pip wheel")])
    for name in ("packaging", "psutil", "pybind11", "protobuf", "decorator", "attrs", "scipy", "expecttest"):
        assert f'"{name}>=' in before, name
    assert "--no-build-isolation" in COMMANDS[place("pip wheel")]


def test_a_repository_is_cloned_into_a_folder_that_is_not_there() -> None:
    """`git clone` refuses a folder with something in it, which a WORKDIR below it makes."""
    for commands in stages():
        made: list[str] = []
        for command in commands:
            made += [command.split()[1]] if command.startswith("WORKDIR ") else []
            for line in re.findall(r"git clone[^&]*", command):
                target = line.split()[-1]
                folder = made[-1] if target == "." else target
                assert not [one for one in made if one.startswith(f"{folder}/")], line


def test_every_step_that_asks_an_index_sees_pips_configuration() -> None:
    """A site with an index of its own has it for all packages; the secret is mounted for one step only."""
    for command in RUNS:
        asks = [
            one
            for one in re.findall(r"pip (?:install|wheel|download)[^&]*", command)
            if "--no-index" not in one
        ]
        mounted = "--mount=type=secret,id=pipconf,target=/etc/pip.conf,required=false" in command
        assert mounted == bool(asks), command


def test_triton_ascend_comes_from_where_this_release_is_and_last() -> None:
    """PyPI has older releases only; sglang and torch bring CUDA's package of the same name."""
    assert not [command for command in RUNS if re.search(r"pip install[^&]*triton-ascend==", command)]
    last = [command for command in RUNS if "pip install" in command][-1]
    assert last.index("uninstall -y triton") < last.index("--force-reinstall /opt/triton-ascend/")
    assert load_pins().triton_ascend_wheels.startswith("https://")


def test_sglang_has_the_version_that_its_corrections_ask_for() -> None:
    (command,) = [command for command in RUNS if "[srt_npu]" in command]
    assert 'SETUPTOOLS_SCM_PRETEND_VERSION="${SGLANG_REF#v}" python3 -m pip install' in command
    corrections = ROOT / "packages/relax-npu/src/relax_npu/sglang/plugins.py"
    release = load_pins().sources["sglang"].release.removeprefix("v")
    assert f'_VERSIONS = ("{release}",)' in corrections.read_text()


def test_nothing_but_what_is_copied_reaches_the_builder() -> None:
    """A working tree has environments, runs and keys; BuildKit reads the list beside the Dockerfile."""
    lines = (ROOT / "docker/Dockerfile.npu.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = {c.split()[1] for c in COMMANDS if c.startswith("COPY ") and "--from" not in c}
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied


def entered(tmp_path: Path, *command: str, **scripts: str) -> subprocess.CompletedProcess[str]:
    """Runs a command through the entry script, with CANN's scripts and the driver in a folder of the test."""
    text = ENTRY.read_text().replace("/usr/local/Ascend", str(tmp_path))
    for name, source in scripts.items():
        path = tmp_path / {"cann": "ascend-toolkit", "atb": "nnal/atb"}[name] / "set_env.sh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "entry.sh").write_text(text)
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/stand-ins"}
    return subprocess.run(
        ["bash", str(tmp_path / "entry.sh"), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_of_canns_that_fails_somewhere_ends_nothing(tmp_path: Path) -> None:
    done = entered(
        tmp_path,
        *("bash", "-c", "echo $CANN $ATB; exit 7"),
        cann="export CANN=here\nfalse\n[[ -n ${UNSET} ]] && export CANN=wrong\n",
        atb="export ATB=${1:-no-word}\nfalse\n",
    )
    assert (done.stdout, done.returncode) == ("here no-word\n", 7), done.stderr


def test_the_drivers_libraries_go_before_the_base_images_stand_ins(tmp_path: Path) -> None:
    show = ("bash", "-c", "echo $LD_LIBRARY_PATH")
    assert entered(tmp_path, *show).stdout == "/stand-ins\n", "without a driver the path is left as it is"
    (tmp_path / "driver/lib64").mkdir(parents=True)
    first, *_, last = entered(tmp_path, *show).stdout.strip().split(":")
    assert (first, last) == (f"{tmp_path}/driver/lib64", "/stand-ins")


def test_operators_are_checked_last_of_all_builds_and_only_on_a_device() -> None:
    assert "relax_kernels check --backend ascend" in RUNS[-1]
    assert "if [ -e /dev/davinci_manager ]" in RUNS[-1]


def test_the_chip_that_the_kernels_are_built_for_is_replaced_and_looked_for() -> None:
    (command,) = [command for command in RUNS if "build.sh -a kernels" in command]
    replaced, checked, built = (
        command.index(text) for text in ("sed -i", "! grep -n", "bash build.sh -a kernels")
    )
    assert replaced < checked < built


def test_canns_environment_is_set_by_the_entry_script_and_never_for_one_step() -> None:
    assert not [command for command in RUNS if "set_env.sh" in command]
    entry = ENTRY.read_text()
    assert entry.count("set_env.sh") == 3
    assert entry.rstrip().endswith('exec "$@"')
    assert f"cann-{load_pins().cann}" in entry


@pytest.mark.parametrize(
    "pattern",
    [r"(?i)(api_?key|token|password|secret)\s*=\s*\S", r"verify\s*=?\s*false", r"--trusted-host", r"http://"],
)
def test_no_secret_and_no_connection_without_tls(pattern: str) -> None:
    assert not [command for command in COMMANDS if re.search(pattern, command)]


def shows_a_key(script: str) -> bool:
    """Whether a script prints its commands, or gives a key as an argument, which others on the host see."""
    prints = re.search(r"^\s*set\s+-\w*x|\bset\s+-o\s+xtrace|^#!.*sh\s+-\w*x", script, re.MULTILINE)
    return bool(prints or re.search(r"--\S*(?:key|token|password)\b|\$\{?\w*(?:_KEY|_TOKEN)\b", script))


def test_a_key_never_stands_in_what_a_shell_shows() -> None:
    """Review of the reference system, finding 5: `set -x` printed a key given on the command line."""
    assert shows_a_key("set -ex\nray job submit -- python train.py")
    assert shows_a_key("python train.py --wandb-key abc")
    assert shows_a_key('ray job submit --runtime-env-json \'{"env": "${WANDB_API_KEY}"}\'')
    assert not shows_a_key("set -euo pipefail\nrelax-train --recipe quickstart")
    for path in [*(ROOT / "docker").iterdir(), ROOT / ".ci/run"]:
        assert not shows_a_key(path.read_text()), path.name


def test_the_container_runs_as_another_user_and_says_whether_it_is_well() -> None:
    users = [command for command in COMMANDS if command.startswith("USER ")]
    # A group beside the number would drop those of the device files, which `docker run --group-add` gives.
    assert users == ["USER 10001"]
    assert any(
        command.startswith("HEALTHCHECK") and '"relax-npu", "doctor"' in command for command in COMMANDS
    )

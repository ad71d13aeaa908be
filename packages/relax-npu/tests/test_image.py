"""The Dockerfile, read: every pin, non-interactive, in order, without secrets, as another user."""

import re
from pathlib import Path

import pytest
from relax_npu.pins import build_arguments, load_pins

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docker/Dockerfile.npu").read_text()
# Comments, also those between the lines of one command, are dropped; continued lines are joined.
LINES = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", TEXT)).splitlines()
COMMANDS = [re.sub(r"\s+", " ", line).strip() for line in LINES if line.strip()]
RUNS = [command for command in COMMANDS if command.startswith("RUN ")]


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
        "pip wheel",
        "build.sh -a kernels",
        '"triton-ascend==',
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
    entry = (ROOT / "docker/npu-entry.sh").read_text()
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
    assert users == ["USER 10001:10001"]
    assert any(
        command.startswith("HEALTHCHECK") and '"relax-npu", "doctor"' in command for command in COMMANDS
    )

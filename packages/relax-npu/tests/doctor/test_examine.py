"""Each check of the doctor on machines made for it: a folder as file system, variables, a probe's result."""

from collections.abc import Callable
from pathlib import Path

import pytest
from relax_npu import Probe, ProbeState
from relax_npu.doctor import Finding, Machine, Report, Status, examine

READY = Probe(
    ProbeState.READY,
    torch="2.9.0+cpu",
    torch_npu="2.9.0.post4",
    count=16,
    name="Ascend910_9391",
    total_memory=2**36,
)
CANN = "/usr/local/Ascend/ascend-toolkit/latest"
Make = Callable[..., Machine]


@pytest.fixture
def healthy(tmp_path: Path) -> Make:
    """A machine on which everything is right; keywords change the environment, the probe or the Python."""

    def write(absolute: str, text: str = "") -> None:
        path = tmp_path / absolute.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for node in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        write(f"/dev/{node}")
    write("/usr/local/Ascend/driver/version.info", "Version=25.5.1\nascendhal_version=7.35.23\n")
    write(
        f"{CANN}/aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=9.0.0\n",
    )

    def make(*, probe: Probe = READY, python: str = "3.11", **environment: str) -> Machine:
        variables = {
            name: value for name, value in ({"ASCEND_HOME_PATH": CANN} | environment).items() if value != "-"
        }
        return Machine(root=tmp_path, environment=variables, python=python, probe=lambda: probe)

    return make


def finding(machine: Machine, check: str) -> Finding:
    (found,) = [found for found in examine(machine).findings if found.check == check]
    return found


def test_a_healthy_machine(healthy: Make) -> None:
    report = examine(healthy())
    assert {found.status for found in report.findings} == {Status.OK}
    assert report.exit_code == 0
    assert "2 NPUs under /dev" in report.as_text()
    assert report.as_text().endswith("0 errors, 0 warnings: nothing stands in the way of the npu device")


def test_every_error_and_warning_has_a_fix(healthy: Make, tmp_path: Path) -> None:
    broken = [
        Machine(root=tmp_path / "empty", environment={}, python="3.12", probe=lambda: Probe(ProbeState.HUNG))
    ]
    broken += [healthy(probe=Probe(state)) for state in ProbeState]
    for machine in broken:
        for found in examine(machine).findings:
            if found.status in {Status.ERROR, Status.WARNING}:
                assert found.fix, found


@pytest.mark.parametrize("state", [state for state in ProbeState if state is not ProbeState.READY])
def test_every_state_but_ready_is_an_error_and_names_what_was_not_looked_at(
    healthy: Make, state: ProbeState
) -> None:
    machine = healthy(probe=Probe(state, stage="take NPU 0", error="why"))
    assert finding(machine, "torch-npu").status is Status.ERROR
    assert finding(machine, "needs-a-device").status is Status.UNKNOWN
    assert examine(machine).exit_code == 1


def test_another_python_is_a_warning(healthy: Make) -> None:
    found = finding(healthy(python="3.12"), "python")
    assert (found.status, found.fix) == (Status.WARNING, "use Python 3.11")
    assert examine(healthy(python="3.12")).exit_code == 0


def test_a_device_file_that_was_not_passed_on(healthy: Make, tmp_path: Path) -> None:
    machine = healthy()
    (tmp_path / "dev/hisi_hdc").unlink()
    found = finding(machine, "device-files")
    assert (found.status, found.fix) == (Status.ERROR, "in a container pass --device /dev/hisi_hdc")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Version=25.5.1", Status.OK),
        ("Version=25.0.rc1.1", Status.OK),
        ("Version=24.1.0", Status.WARNING),
        ("Version=24.25.0", Status.WARNING),
        ("Version=25.50.1", Status.WARNING),
        ("nothing", Status.ERROR),
    ],
)
def test_driver_versions(healthy: Make, tmp_path: Path, text: str, status: Status) -> None:
    machine = healthy()
    (tmp_path / "usr/local/Ascend/driver/version.info").write_text(text)
    assert finding(machine, "driver").status is status


def test_cann_installed_but_its_environment_not_set(healthy: Make) -> None:
    found = finding(healthy(ASCEND_HOME_PATH="-"), "cann")
    assert found.status is Status.ERROR
    assert "environment is not set" in found.message
    assert found.fix == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def test_a_home_of_cann_that_is_not_there(healthy: Make) -> None:
    found = finding(healthy(ASCEND_HOME_PATH="/opt/none"), "cann")
    assert (found.status, "ASCEND_HOME_PATH=/opt/none is no folder" in found.message) == (Status.ERROR, True)


@pytest.mark.parametrize(("version", "status"), [("8.3.RC1", Status.WARNING), ("", Status.UNKNOWN)])
def test_versions_of_cann(healthy: Make, tmp_path: Path, version: str, status: Status) -> None:
    machine = healthy()
    info = next(tmp_path.rglob("ascend_toolkit_install.info"))
    info.write_text(f"version={version}\n" if version else "")
    assert finding(machine, "cann").status is status


@pytest.mark.parametrize(
    ("torch", "torch_npu", "status"),
    [
        ("2.9.0", "2.9.0.post4", Status.OK),
        ("2.9.0", "2.9.0.post9", Status.WARNING),
        ("2.9.1", "2.9.0.post4", Status.WARNING),
        ("2.11.0", "2.9.0.post4", Status.ERROR),
    ],
)
def test_pairs_of_torch_and_torch_npu(healthy: Make, torch: str, torch_npu: str, status: Status) -> None:
    machine = healthy(probe=Probe(ProbeState.READY, torch=torch, torch_npu=torch_npu))
    assert finding(machine, "versions").status is status


@pytest.mark.parametrize(("autoload", "told"), [("-", True), ("1", True), ("0", False)])
def test_a_broken_torch_npu_breaks_torch_unless_it_is_not_loaded(
    healthy: Make, autoload: str, told: bool
) -> None:
    machine = healthy(probe=Probe(ProbeState.BROKEN), TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert any(found.check == "torch-import" for found in examine(machine).findings) is told


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("-", Status.OK, "every NPU is visible"),
        ("0,1", Status.OK, "=0,1"),
        ("1,0", Status.ERROR, "do not ascend"),
        ("0, 1", Status.ERROR, "' 1' is not a device id"),
        ("", Status.ERROR, "hides every NPU"),
        ("0,9", Status.ERROR, "/dev has no davinci9"),
    ],
)
def test_visible_devices(healthy: Make, value: str, status: Status, words: str) -> None:
    found = finding(healthy(ASCEND_RT_VISIBLE_DEVICES=value), "visible-devices")
    assert found.status is status
    assert words in found.message


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, Status.OK),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, Status.OK),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}, Status.WARNING),
        ({"HCCL_NPU_SOCKET_PORT_RANGE": "9-1"}, Status.ERROR),
        (
            {
                "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
                "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
                "HCCL_IF_BASE_PORT": "60000",
            },
            Status.WARNING,
        ),
    ],
)
def test_ports_of_hccl(healthy: Make, variables: dict[str, str], status: Status) -> None:
    assert finding(healthy(**variables), "hccl-ports").status is status


def test_allocator_settings_that_exclude_one_another(healthy: Make) -> None:
    machine = healthy(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64")
    found = finding(machine, "allocator")
    assert found.status is Status.ERROR
    assert found.fix == "drop max_split_size_mb or set expandable_segments:False"


def test_the_text_says_what_to_do() -> None:
    report = Report("0.1.0", (Finding("cann", Status.ERROR, "CANN is not installed", "install it"),))
    assert report.as_text().splitlines() == [
        "relax-npu 0.1.0",
        "   error  cann: CANN is not installed",
        "     fix  install it",
        "1 errors, 0 warnings: the npu device will not work here",
    ]

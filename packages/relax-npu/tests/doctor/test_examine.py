"""Each check of the doctor on machines made for it: a folder as file system, variables, a probe's result."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
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
    free_memory=2**36 - 2**31,
    fla_npu="loaded",
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
    write("/usr/local/Ascend/firmware/version.info", "Version=7.8.0.6.201\n")
    write("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:   536870912 kB\n")
    write("/sys/class/net/enp23s0f3/address")
    write("/sys/class/net/lo/address")
    (tmp_path / "dev/shm").mkdir()
    write(
        f"{CANN}/aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=9.0.0\n",
    )

    write(f"{CANN}/aarch64-linux/ascend_ops_install.info", "package_name=Ascend-cann-A3-ops\nversion=9.0.0\n")

    def make(
        *,
        probe: Probe = READY,
        python: str = "3.11",
        shared: int = 2**37,
        taken: tuple[int, ...] = (),
        **environment: str,
    ) -> Machine:
        variables = {
            name: value for name, value in ({"ASCEND_HOME_PATH": CANN} | environment).items() if value != "-"
        }
        return Machine(
            root=tmp_path,
            environment=variables,
            python=python,
            probe=lambda: probe,
            disk_bytes=lambda path: shared,
            port_free=lambda port: port not in taken,
        )

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
    broken.append(healthy(shared=0, taken=(60000,), TASK_QUEUE_ENABLE="x", GLOO_SOCKET_IFNAME="eth9"))
    packages = {"triton": "3.5.0", "triton-ascend": "3.2.0", "fla-core": "1", "fla-npu": "1"}
    chip = replace(READY, name="Ascend910B1", free_memory=0, installed=packages, torch_npu="2.9.0")
    broken.append(healthy(probe=chip, ASCEND_LAUNCH_BLOCKING="1", TASK_QUEUE_ENABLE="2"))
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


def test_canns_own_folder_of_newer_releases(healthy: Make, tmp_path: Path) -> None:
    own = tmp_path / "usr/local/Ascend/cann"
    own.mkdir()
    (own / "set_env.sh").touch()
    found = finding(healthy(ASCEND_HOME_PATH="-"), "cann")
    assert "CANN lies in /usr/local/Ascend/cann," in found.message
    assert found.fix == "source /usr/local/Ascend/cann/set_env.sh"


@pytest.mark.parametrize(
    ("version", "words"), [("8.5.0", "operators 8.5.0 with a toolkit 9.0.0"), (None, "no kernel is found")]
)
def test_a_toolkit_without_its_operators(healthy: Make, tmp_path: Path, version, words: str) -> None:
    machine = healthy()
    assert finding(machine, "cann-operators").status is Status.OK
    file = next(tmp_path.rglob("ascend_ops_install.info"))
    file.write_text(f"version={version}\n") if version else file.unlink()
    found = finding(machine, "cann-operators")
    assert found.status is Status.WARNING
    assert words in found.message
    assert "Ascend-cann-A3-ops 9.0.0" in str(found.fix)


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


@pytest.mark.parametrize(
    ("firmware", "driver", "status"),
    [
        ("7.8.0.6.201", "25.5.1", Status.OK),
        ("7.5.0.1.129", "25.5.1", Status.WARNING),
        ("7.80.1", "25.5.1", Status.WARNING),
        ("7.5.0.1.129", "25.2.0", Status.OK),
        ("", "25.5.1", Status.UNKNOWN),
    ],
)
def test_the_firmware_belongs_to_the_driver(
    healthy: Make, tmp_path: Path, firmware: str, driver: str, status: Status
) -> None:
    machine = healthy()
    (tmp_path / "usr/local/Ascend/driver/version.info").write_text(f"Version={driver}")
    (tmp_path / "usr/local/Ascend/firmware/version.info").write_text(
        f"Version={firmware}" if firmware else ""
    )
    assert finding(machine, "firmware").status is status


def test_an_npu_that_another_process_holds(healthy: Make) -> None:
    found = finding(healthy(probe=replace(READY, free_memory=2**35)), "device-memory")
    assert found.status is Status.WARNING
    assert found.message.startswith("32.0 of 64.0 GiB of NPU 0 free")


def test_the_memory_of_the_host(healthy: Make, tmp_path: Path) -> None:
    machine = healthy()
    assert "512 GiB available" in finding(machine, "host-memory").message
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 33554432 kB")
    found = finding(machine, "host-memory")
    assert found.status is Status.WARNING
    assert "32 GiB available" in found.message


def test_dockers_own_shared_memory_is_too_small(healthy: Make) -> None:
    found = finding(healthy(shared=2**26), "shared-memory")
    assert found.status is Status.WARNING
    assert "--shm-size" in str(found.fix)


@pytest.mark.parametrize(
    ("ports", "taken", "given", "words"),
    [
        (None, (60003,), "32768 60999", "another process listens on port 60003"),
        ("50000-50001", (50000, 50001), "1 2", "listen on all of them"),
        ("50000-50001", (50000,), "1 2", None),
        ("32700-40000", (), "32768 60999", "the host gives ports 32768 to 60999 to any process"),
        ("63000-63050", (), "32768 60999", None),
    ],
)
def test_ports_that_others_use(healthy: Make, tmp_path: Path, ports, taken, given, words) -> None:
    path = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    path.parent.mkdir(parents=True)
    path.write_text(given)
    both = {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": ports or ""}
    found = finding(healthy(taken=taken, **(both if ports else {})), "hccl-ports")
    assert found.status is (Status.OK if words is None else Status.WARNING)
    assert words is None or words in found.message


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("HCCL_BUFFSIZE", "0", "200"),
        ("TASK_QUEUE_ENABLE", "true", "2"),
        ("ASCEND_LAUNCH_BLOCKING", "2", "0"),
        ("HCCL_CONNECT_TIMEOUT", "20m", "1200"),
        ("CPU_AFFINITY_CONF", "1,0-3", "1,npu0:0-3,npu1:4-7"),
        ("HCCL_DETERMINISTIC", "1", "True"),
        ("MULTI_STREAM_MEMORY_REUSE", "-1", "1"),
    ],
)
def test_values_that_a_variable_does_not_take(healthy: Make, name: str, wrong: str, right: str) -> None:
    found = finding(healthy(**{name: wrong}), "settings")
    assert found.status is Status.ERROR
    assert f"{name}={wrong!r}" in found.message
    assert finding(healthy(**{name: right}), "settings").status is Status.OK


@pytest.mark.parametrize("value", ["enp23s0f3", "=enp23s0f3", "^lo", "enp"])
def test_network_interfaces_that_are_there(healthy: Make, value: str) -> None:
    checks = {found.check for found in examine(healthy(HCCL_SOCKET_IFNAME=value)).findings}
    assert "network-interface" not in checks


def test_a_network_interface_that_is_not_there(healthy: Make) -> None:
    found = finding(healthy(HCCL_SOCKET_IFNAME="eth0"), "network-interface")
    assert found.status is Status.ERROR
    assert "enp23s0f3, lo" in str(found.fix)


GROWING = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TMS_HOOK_MODE": "preload"}
TWO_TRITONS = {"triton": "3.5.0", "triton-ascend": "3.2.1"}
TWO_FLAS = {"fla-core": "0.4.1", "flash-linear-attention-npu": "1"}


@pytest.mark.parametrize(
    ("variables", "installed", "changed", "words", "status"),
    [
        (GROWING, {}, {}, "expandable segments with torch_memory_saver", Status.ERROR),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, {}, {}, "cannot capture graphs", Status.WARNING),
        ({"TASK_QUEUE_ENABLE": "2"}, {}, {}, "seen to give NaN", Status.WARNING),
        ({"SGLANG_ENABLE_SPEC_V2": "1"}, {}, {}, "is read by no SGLang", Status.WARNING),
        ({"HCCL_ASYNC_ERROR_HANDLING": "1"}, {}, {}, "is not read any more", Status.WARNING),
        ({}, TWO_TRITONS, {}, "are one package `triton`", Status.ERROR),
        ({}, {"triton": "3.5.0"}, {}, "is CUDA's", Status.WARNING),
        ({}, {"triton-ascend": "3.2.0"}, {}, "triton-ascend 3.2.0 with CANN 9.0.0", Status.WARNING),
        ({}, TWO_FLAS, {}, "package `fla`", Status.ERROR),
        ({}, {}, {"torch_npu": "2.9.0.post2"}, "fla_npu refuses torch_npu 2.9.0.post2", Status.ERROR),
        ({}, {"mindspeed": "0.16.0", "numpy": "2.4.6"}, {}, "takes numpy 1", Status.WARNING),
        ({}, {}, {"name": "Ascend910B1"}, "Ascend910B1 is another chip", Status.WARNING),
    ],
)
def test_known_bad_combinations(healthy: Make, variables, installed, changed, words, status) -> None:
    assert finding(healthy(), "combinations").status is Status.OK
    machine = healthy(probe=replace(READY, installed=installed, **changed), **variables)
    found = finding(machine, "combinations")
    assert words in found.message
    assert found.status is status
    assert found.fix


WITH = replace(READY, installed={"mindspeed": "0.16.0"}, mindspeed=("use_flash_attn", "affinity"))
OLD = replace(WITH, installed={"mindspeed": "0.12.1"})


@pytest.mark.parametrize(
    ("probe", "variable", "status", "words"),
    [
        (READY, "-", Status.OK, "Relax runs without it"),
        (READY, "1", Status.ERROR, "asks for MindSpeed, which is not installed"),
        (READY, "yes", Status.ERROR, "allowed: 0, 1, or a JSON object"),
        (WITH, "1", Status.OK, "MindSpeed 0.16.0 (used); features on: use_flash_attn, affinity"),
        (WITH, "-", Status.OK, "(not used, RELAX_NPU_MINDSPEED=1 uses it)"),
        (OLD, "1", Status.ERROR, "made for 0.16.0"),
        (OLD, "-", Status.WARNING, "made for 0.16.0"),
        (replace(WITH, mindspeed_error="ImportError: no torchair"), "1", Status.ERROR, "no torchair"),
    ],
)
def test_mindspeed_and_its_features(healthy: Make, probe, variable, status, words) -> None:
    found = finding(healthy(probe=probe, RELAX_NPU_MINDSPEED=variable), "mindspeed")
    assert found.status is status
    assert words in found.message


def test_the_text_says_what_to_do() -> None:
    report = Report("0.1.0", (Finding("cann", Status.ERROR, "CANN is not installed", "install it"),))
    assert report.as_text().splitlines() == [
        "relax-npu 0.1.0",
        "   error  cann: CANN is not installed",
        "     fix  install it",
        "1 errors, 0 warnings: the npu device will not work here",
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"ASCEND_RT_VISIBLE_DEVICES": "9" * 5000},
        {"HCCL_HOST_SOCKET_PORT_RANGE": "9" * 5000, "HCCL_NPU_SOCKET_PORT_RANGE": "auto"},
        {"HCCL_BUFFSIZE": "9" * 5000},
        {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:" + "9" * 5000},
        {"RELAX_NPU_MINDSPEED": "[" * 100_000},
        {"ASCEND_HOME_PATH": "/" + "a" * 5000},
        {"ASCEND_HOME_PATH": "/proc/self/mem/\udcff"},
        {"HCCL_SOCKET_IFNAME": "eth\udcff"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_no_value_of_a_variable_ends_the_examination(healthy: Make, variables: dict[str, str]) -> None:
    report = examine(healthy(**variables))
    json.loads(report.as_json())
    assert report.as_text()


def closed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes paths with these names answer as for a user who may not look (the tests may run as root)."""
    usual = os.stat

    def stat(path, *args, **kwargs):
        if any(name in os.fspath(path) for name in names if isinstance(path, str | os.PathLike)):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)


def test_a_folder_of_canns_that_is_closed_to_the_user(healthy: Make, monkeypatch) -> None:
    machine = healthy()
    closed(monkeypatch, "ascend-toolkit")
    found = finding(machine, "cann")
    assert found.status is Status.ERROR
    assert "no folder that this user may look into" in found.message
    assert finding(healthy(ASCEND_HOME_PATH="-"), "cann").message == "CANN is not installed"


def test_files_that_cannot_be_read(healthy: Make, tmp_path: Path) -> None:
    """A folder in a file's place is refused to root too."""
    for name in ("driver/version.info", "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"):
        path = tmp_path / "usr/local/Ascend" / name
        path.unlink()
        path.mkdir()
    report = examine(healthy())
    told = {found.check: found for found in report.findings}
    assert "cannot be read by this user" in told["driver"].message
    assert "install" not in str(told["driver"].fix)
    assert told["cann"].status is Status.UNKNOWN

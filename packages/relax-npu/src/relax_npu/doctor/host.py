"""The host's part: Python, device nodes, driver and CANN."""

import re

from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins

_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
_FIRMWARE_INFO = "/usr/local/Ascend/firmware/version.info"
_TOOLKITS = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/ascend-toolkit",
    "/usr/local/Ascend/latest",
)
_OPS_FILES = ("*-linux/ascend_ops_install.info",)
_CANN_FILES = (
    "ascend_toolkit_install.info",
    "*-linux/ascend_toolkit_install.info",
    "version.info",
    "version.cfg",
)
_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_VERSION = re.compile(r"^\s*version\s*=\s*\[?([^\s\]]+)", re.IGNORECASE | re.MULTILINE)


def python(machine: Machine, pins: Pins) -> list[Finding]:
    """The Python that the CANN image has."""
    if machine.python in pins.python:
        return [Finding("python", Status.OK, f"Python {machine.python}")]
    wanted = " or ".join(pins.python)
    return [
        Finding(
            "python",
            Status.WARNING,
            f"Python {machine.python}; CANN {pins.cann}'s image and its operators are made for {wanted}",
            f"use Python {wanted}",
        )
    ]


def nodes(machine: Machine, pins: Pins) -> list[Finding]:
    """The device files of the driver."""
    numbered = [
        path for path in machine.path("/dev").glob("davinci*") if path.name.removeprefix("davinci").isdigit()
    ]
    if not numbered:
        fix = (
            "install driver and firmware; in a container pass each NPU: "
            f"--device /dev/davinci0 ... {' '.join(f'--device {node}' for node in _NODES)}"
        )
        return [Finding("device-files", Status.ERROR, "no /dev/davinci<n>: no NPU, or not passed on", fix)]
    missing = [node for node in _NODES if not machine.path(node).exists()]
    if missing:
        fix = " ".join(["in a container pass", *(f"--device {node}" for node in missing)])
        return [Finding("device-files", Status.ERROR, f"{', '.join(missing)} missing", fix)]
    return [Finding("device-files", Status.OK, f"{len(numbered)} NPUs under /dev")]


def driver(machine: Machine, pins: Pins) -> list[Finding]:
    """The driver's version against what the pinned CANN works with."""
    text = machine.read(_DRIVER_INFO)
    match = _VERSION.search(text or "")
    if text is None and machine.exists(_DRIVER_INFO):
        fix = "as its owner, chmod a+r it; in a container run with the group of the driver's files"
        return [Finding("driver", Status.ERROR, f"{_DRIVER_INFO} cannot be read by this user", fix)]
    if not match:
        fix = "install the driver; in a container mount /usr/local/Ascend/driver and /etc/ascend_install.info"
        return [Finding("driver", Status.ERROR, f"no version in {_DRIVER_INFO}", fix)]
    found = match.group(1)
    if any(f"{found.lower()}.".startswith(f"{series}.") for series in pins.driver):
        return [Finding("driver", Status.OK, f"driver {found}")]
    allowed = ", ".join(pins.driver)
    return [
        Finding(
            "driver",
            Status.WARNING,
            f"driver {found} is not in the release note of CANN {pins.cann} ({allowed})",
            f"install a driver of one of the series {allowed}",
        )
    ]


def firmware(machine: Machine, pins: Pins) -> list[Finding]:
    """The firmware's version against the driver's; it lies on the host, a container may not see it."""
    match = _VERSION.search(machine.read(_FIRMWARE_INFO) or "")
    if not match:
        fix = f"on the host, read {_FIRMWARE_INFO} or `npu-smi info -t board -i 0`"
        return [Finding("firmware", Status.UNKNOWN, f"no version in {_FIRMWARE_INFO}", fix)]
    found = match.group(1)
    told = _VERSION.search(machine.read(_DRIVER_INFO) or "")
    driver_version = told.group(1) if told else ""
    for series, wanted in pins.firmware.items():
        if f"{driver_version}.".startswith(f"{series}.") and not f"{found}.".startswith(f"{wanted}."):
            message = f"firmware {found} with driver {driver_version}, which belongs to firmware {wanted}"
            fix = f"install the firmware {wanted} of the driver's own release, then restart the host"
            return [Finding("firmware", Status.WARNING, message, fix)]
    return [Finding("firmware", Status.OK, f"firmware {found}")]


def cann(machine: Machine, pins: Pins) -> list[Finding]:
    """CANN: installed, its environment set, its version."""
    home = machine.environment.get("ASCEND_HOME_PATH") or machine.environment.get("ASCEND_TOOLKIT_HOME")
    installed = [place for place in _TOOLKITS if machine.is_folder(place)]
    if not home:
        if installed:
            message = f"CANN lies in {installed[0]}, but its environment is not set (ASCEND_HOME_PATH)"
            own = f"{installed[0]}/set_env.sh"
            fix = f"source {own}" if machine.exists(own) else _SET_ENV
            return [Finding("cann", Status.ERROR, message, fix)]
        fix = f"install the CANN {pins.cann} toolkit, then `{_SET_ENV}`"
        return [Finding("cann", Status.ERROR, "CANN is not installed", fix)]
    if not machine.is_folder(home):
        fix = f"{_SET_ENV}, or correct ASCEND_HOME_PATH"
        message = f"ASCEND_HOME_PATH={home} is no folder that this user may look into"
        return [Finding("cann", Status.ERROR, message, fix)]
    found = _version(machine, home, _CANN_FILES)
    if found is None:
        return [Finding("cann", Status.UNKNOWN, f"CANN in {home}, version not found there")]
    if found == pins.cann:
        return [Finding("cann", Status.OK, f"CANN {found}"), _operators(machine, home, found)]
    message = f"CANN {found}; torch_npu {pins.torch_npu} is made for {pins.cann}"
    return [Finding("cann", Status.WARNING, message, f"install CANN {pins.cann}")]


def _operators(machine: Machine, home: str, toolkit: str) -> Finding:
    """CANN's operators, a package of their own for each chip; the toolkit alone computes nothing."""
    fix = f"install Ascend-cann-A3-ops {toolkit} beside the toolkit, as CANN's images have it"
    found = _version(machine, home, _OPS_FILES)
    if found is None:
        message = f"CANN's package of operators is not in {home}; without it no kernel is found"
        return Finding("cann-operators", Status.WARNING, message, fix)
    if found != toolkit:
        message = f"CANN's operators {found} with a toolkit {toolkit}"
        return Finding("cann-operators", Status.WARNING, message, fix)
    return Finding("cann-operators", Status.OK, f"CANN's operators {found}")


def _version(machine: Machine, home: str, patterns: tuple[str, ...]) -> str | None:
    folder = machine.path(home)
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            match = _VERSION.search(machine.read(f"{home}/{path.relative_to(folder)}") or "")
            if match:
                return match.group(1)
    return None

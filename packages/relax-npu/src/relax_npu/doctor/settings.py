"""Variables that torch_npu, HCCL and CANN read: whether each has a value that they take."""

import re
from collections.abc import Callable

from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins

_NETWORKS = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_INTERFACES = "/sys/class/net"


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda text: text in values


def _number(least: int) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(r"[0-9]{1,18}", text) is not None and int(text) >= least


def _affinity(text: str) -> bool:
    return re.fullmatch(r"[012](,npu\d+:\d+-\d+)*", text) is not None


SETTINGS: dict[str, tuple[Callable[[str], bool], str]] = {
    "ASCEND_LAUNCH_BLOCKING": (_one_of("0", "1"), "0 or 1"),
    "COMBINED_ENABLE": (_one_of("0", "1"), "0 or 1"),
    "INF_NAN_MODE_ENABLE": (_one_of("0", "1"), "0 or 1"),
    "TASK_QUEUE_ENABLE": (_one_of("0", "1", "2"), "0, 1 or 2"),
    "MULTI_STREAM_MEMORY_REUSE": (_one_of("0", "1", "2", "3"), "0 to 3"),
    "NPU_ASD_ENABLE": (_one_of("0", "1", "2", "3"), "0 to 3"),
    "CPU_AFFINITY_CONF": (_affinity, "0, 1 or 2, and cores as in 1,npu0:0-23"),
    "HCCL_BUFFSIZE": (_number(1), "megabytes, at least 1"),
    "P2P_HCCL_BUFFSIZE": (_number(0), "megabytes, at least 0"),
    "HCCL_CONNECT_TIMEOUT": (_number(1), "seconds, at least 1"),
    "HCCL_EXEC_TIMEOUT": (_number(0), "seconds, at least 0"),
    "HCCL_EVENT_TIMEOUT": (_number(0), "seconds, at least 0"),
    "ACL_DEVICE_SYNC_TIMEOUT": (_number(1), "seconds, at least 1"),
    "HCCL_DETERMINISTIC": (
        lambda text: text.lower() in ("true", "false", "strict"),
        "true, false or strict",
    ),
}
"""What each variable takes, and how to say it."""


def values(machine: Machine, pins: Pins) -> list[Finding]:
    """One finding for each variable with a value that it does not take."""
    wrong = [
        Finding(
            "settings", Status.ERROR, f"{name}={text!r} is not {allowed}", f"export it anew, or unset {name}"
        )
        for name, (takes, allowed) in SETTINGS.items()
        if (text := machine.environment.get(name)) is not None and not takes(text)
    ]
    given = sum(name in machine.environment for name in SETTINGS)
    return wrong or [Finding("settings", Status.OK, f"{given} of {len(SETTINGS)} known variables are set")]


def networks(machine: Machine, pins: Pins) -> list[Finding]:
    """Whether the network interfaces that are named exist; = (exactly) and ^ (all but) are HCCL's."""
    there = machine.path(_INTERFACES)
    if not there.is_dir():
        return []
    names = sorted(path.name for path in there.iterdir())
    found = []
    for variable in _NETWORKS:
        text = machine.environment.get(variable, "")
        wanted = [name for name in text.lstrip("=^").split(",") if name]
        missing = [name for name in wanted if not any(one.startswith(name) for one in names)]
        if missing:
            message = f"{variable}={text}, but this host has no interface {missing[0]}"
            fix = f"export {variable}=<one of {', '.join(names)}>, or unset it"
            found.append(Finding("network-interface", Status.ERROR, message, fix))
    return found

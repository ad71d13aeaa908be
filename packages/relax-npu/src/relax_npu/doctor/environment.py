"""The environment's part: visible devices, HCCL's ports, the allocator."""

from relax_npu import allocator, hccl, visible
from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins

_DEFAULT_HOST_PORTS = range(60000, 60016)
_MOST_TRIED = 64


def visible_devices(machine: Machine, pins: Pins) -> list[Finding]:
    """Whether CANN takes ASCEND_RT_VISIBLE_DEVICES as it reads."""
    listed = machine.environment.get(visible.VARIABLE)
    if listed is None:
        return [Finding("visible-devices", Status.OK, f"{visible.VARIABLE} is not set: every NPU is visible")]
    try:
        ids = visible.parse_visible(listed)
    except visible.VisibleDevicesError as error:
        return [
            Finding(
                "visible-devices", Status.ERROR, str(error), "set it to the ids, ascending, without spaces"
            )
        ]
    if not ids:
        message = f"{visible.VARIABLE} is empty, which hides every NPU"
        return [Finding("visible-devices", Status.ERROR, message, f"unset {visible.VARIABLE} or list ids")]
    there = machine.path("/dev")
    missing = [number for number in ids if not (there / f"davinci{number}").exists()]
    if missing:
        message = f"{visible.VARIABLE}={listed}, but /dev has no davinci{missing[0]}"
        return [
            Finding(
                "visible-devices", Status.ERROR, message, "list ids that are there; they are physical ones"
            )
        ]
    return [Finding("visible-devices", Status.OK, f"{visible.VARIABLE}={listed}")]


def hccl_ports(machine: Machine, pins: Pins) -> list[Finding]:
    """The port ranges, which several processes on a die need."""
    findings = []
    given = {
        name: text
        for name in (hccl.DEVICE_PORTS, hccl.HOST_PORTS)
        if (text := machine.environment.get(name)) is not None
    }
    for name, text in given.items():
        try:
            hccl.parse_ports(text)
        except hccl.PortRangeError as error:
            findings.append(Finding("hccl-ports", Status.ERROR, f"{name}: {error}", f"export {name}=auto"))
    if findings:
        return findings
    if len(given) == 1:
        (other,) = {hccl.DEVICE_PORTS, hccl.HOST_PORTS} - set(given)
        message = f"{next(iter(given))} is set and {other} is not; processes that share a die need both"
        return [Finding("hccl-ports", Status.WARNING, message, f"export {other}=auto")]
    if not given:
        both = f"{hccl.DEVICE_PORTS}=auto {hccl.HOST_PORTS}=auto"
        fix = f"for processes that share a die: export {both} on every rank"
        taken = [port for port in _DEFAULT_HOST_PORTS if not machine.port_free(port)]
        if taken:
            message = f"another process listens on port {taken[0]}, one of HCCL's default ones"
            return [Finding("hccl-ports", Status.WARNING, message, f"export {both} on every rank")]
        message = "HCCL's default ports: enough for one process per die"
        return [Finding("hccl-ports", Status.OK, message, fix)]
    wrong = _taken(machine, hccl.parse_ports(given[hccl.HOST_PORTS]))
    if wrong:
        message = f"{hccl.HOST_PORTS}={given[hccl.HOST_PORTS]}: {wrong}"
        return [Finding("hccl-ports", Status.WARNING, message, f"export {hccl.HOST_PORTS}=auto")]
    if hccl.HOST_BASE_PORT in machine.environment:
        message = f"{hccl.HOST_BASE_PORT} has no effect beside {hccl.HOST_PORTS}"
        return [Finding("hccl-ports", Status.WARNING, message, f"unset {hccl.HOST_BASE_PORT}")]
    return [Finding("hccl-ports", Status.OK, ", ".join(f"{name}={text}" for name, text in given.items()))]


def _taken(machine: Machine, ranges: hccl.Ranges | None) -> str:
    """What is wrong with a range of ports on this host; "" when nothing is."""
    if ranges is None:
        return ""
    ports = [port for low, high in ranges for port in range(low, high + 1)]
    used = [port for port in ports[:_MOST_TRIED] if not machine.port_free(port)]
    if used and len(used) == len(ports[:_MOST_TRIED]):
        return "other processes listen on all of them"
    told = (machine.read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(told) == 2 and any(int(told[0]) <= port <= int(told[1]) for port in ports):
        return f"the host gives ports {told[0]} to {told[1]} to any process that connects"
    return ""


def memory_allocator(machine: Machine, pins: Pins) -> list[Finding]:
    """Settings of the allocator that exclude one another."""
    text = machine.environment.get(allocator.VARIABLE, "")
    problems = allocator.allocator_problems(text)
    if not problems:
        return [
            Finding(
                "allocator", Status.OK, f"{allocator.VARIABLE}={text}" if text else "torch_npu's defaults"
            )
        ]
    return [
        Finding(
            "allocator", Status.ERROR, f"{allocator.VARIABLE}={text}: {problem}", problem.partition("; ")[2]
        )
        for problem in problems
    ]

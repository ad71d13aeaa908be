"""The environment's part: visible devices, HCCL's ports, the allocator."""

from relax_npu import allocator, hccl, visible
from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins


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
        message = "HCCL's default ports: enough for one process per die"
        both = f"{hccl.DEVICE_PORTS}=auto {hccl.HOST_PORTS}=auto"
        fix = f"for processes that share a die: export {both} on every rank"
        return [Finding("hccl-ports", Status.OK, message, fix)]
    if hccl.HOST_BASE_PORT in machine.environment:
        message = f"{hccl.HOST_BASE_PORT} has no effect beside {hccl.HOST_PORTS}"
        return [Finding("hccl-ports", Status.WARNING, message, f"unset {hccl.HOST_BASE_PORT}")]
    return [Finding("hccl-ports", Status.OK, ", ".join(f"{name}={text}" for name, text in given.items()))]


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

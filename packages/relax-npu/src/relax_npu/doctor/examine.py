"""Runs every check, from the host up to the environment."""

from collections.abc import Callable
from importlib.metadata import version

from relax_npu.doctor import environment, host, memory, settings, software
from relax_npu.doctor.finding import Finding, Report
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins, load_pins

CHECKS: tuple[Callable[[Machine, Pins], list[Finding]], ...] = (
    host.python,
    host.nodes,
    host.driver,
    host.firmware,
    host.cann,
    software.torch_npu,
    memory.host,
    settings.values,
    settings.networks,
    environment.visible_devices,
    environment.hccl_ports,
    environment.memory_allocator,
)


def examine(machine: Machine | None = None) -> Report:
    """Examines a machine, this one when None; changes nothing on it."""
    looked_at = machine or Machine()
    pins = load_pins()
    findings = tuple(finding for check in CHECKS for finding in check(looked_at, pins))
    return Report(relax_npu=version("relax-npu"), findings=findings)

"""The memory's part: of the NPUs, of the host, and what processes share."""

import re

from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins
from relax_npu.probe import Probe, ProbeState

_GIB = 2**30
_SHARED = "/dev/shm"
_LEAST_SHARED = 16 * _GIB
_LEAST_FREE = 0.9
"""Of an NPU's memory; the driver itself keeps a few per cent."""


def device(probe: Probe) -> list[Finding]:
    """Whether NPU 0 is free."""
    if probe.state is not ProbeState.READY or probe.free_memory < 0:
        return []
    told = f"{probe.free_memory / _GIB:.1f} of {probe.total_memory / _GIB:.1f} GiB of NPU 0 free"
    if probe.free_memory >= _LEAST_FREE * probe.total_memory:
        return [Finding("device-memory", Status.OK, told)]
    fix = "`npu-smi info` shows the processes on it; end the one that is left over, by its id"
    return [Finding("device-memory", Status.WARNING, f"{told}: another process holds the rest", fix)]


def host(machine: Machine, pins: Pins) -> list[Finding]:
    """The host's memory, and what of it processes may share."""
    found = []
    match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.MULTILINE)
    if match:
        available = int(match.group(1)) * 1024
        told = f"{available / _GIB:.0f} GiB available"
        if available >= 64 * _GIB:
            found.append(Finding("host-memory", Status.OK, told))
        else:
            fix = "end what else runs here, or give the container more: weights and states pass through it"
            less = f"{told}, less than one NPU has"
            found.append(Finding("host-memory", Status.WARNING, less, fix))
    if machine.path(_SHARED).is_dir():
        size = machine.disk_bytes(machine.path(_SHARED))
        told = f"{_SHARED} has {size / _GIB:.1f} GiB"
        if size >= _LEAST_SHARED:
            found.append(Finding("shared-memory", Status.OK, told))
        else:
            fix = "start the container with --shm-size 200g; docker's own default is 64 MiB"
            message = f"{told}; weights travel to the engine through it"
            found.append(Finding("shared-memory", Status.WARNING, message, fix))
    return found

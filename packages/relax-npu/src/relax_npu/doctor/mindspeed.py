"""MindSpeed's part: whether it is used, its version, and which of its features are on."""

import os

from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins
from relax_npu.probe import Probe
from relax_npu.upstream.mindspeed_fixes import VERSIONS
from relax_npu.upstream.mindspeed_use import ALWAYS, VARIABLE, MindSpeedSettingError, switches


def wanted_switches() -> dict[str, object]:
    """The switches of a run in this environment; without any of its own, those that are always set."""
    try:
        return {**ALWAYS, **(switches(os.environ.get(VARIABLE)) or {})}
    except MindSpeedSettingError:
        return dict(ALWAYS)


def find(machine: Machine, probe: Probe, pins: Pins) -> list[Finding]:
    """One finding about MindSpeed."""
    source = pins.sources["mindspeed"]
    install = f"install MindSpeed {source.release} at commit {source.commit[:12]}"
    try:
        wanted = switches(machine.environment.get(VARIABLE))
    except MindSpeedSettingError as error:
        return [Finding("mindspeed", Status.ERROR, str(error), f"export {VARIABLE}=1, or unset it")]
    version = probe.installed.get("mindspeed", "")
    if not version:
        if wanted is None:
            return [Finding("mindspeed", Status.OK, "not installed; Relax runs without it")]
        message = f"{VARIABLE} asks for MindSpeed, which is not installed"
        return [Finding("mindspeed", Status.ERROR, message, f"{install}, or unset {VARIABLE}")]
    if version not in VERSIONS:
        status = Status.WARNING if wanted is None else Status.ERROR
        message = f"MindSpeed {version}; the corrections are made for {', '.join(VERSIONS)}"
        return [Finding("mindspeed", status, message, install)]
    if probe.mindspeed_error:
        status = Status.WARNING if wanted is None else Status.ERROR
        message = f"MindSpeed {version}: its features cannot be read: {probe.mindspeed_error}"
        return [
            Finding("mindspeed", status, message, f"{install}; it needs CANN's environment and torch_npu")
        ]
    used = "used" if wanted is not None else f"not used, {VARIABLE}=1 uses it"
    on = ", ".join(probe.mindspeed) or "none"
    return [Finding("mindspeed", Status.OK, f"MindSpeed {version} ({used}); features on: {on}")]

"""The Python packages' part: does torch_npu work, and are the versions those that belong together."""

from relax_npu.doctor import combinations, memory, mindspeed
from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.operators.table import CAPABILITIES
from relax_npu.pins import Pins
from relax_npu.probe import AUTOLOAD, Probe, ProbeState

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_INSTALL = "uv sync --no-default-groups --group ascend"
_ONLY_A_DEVICE_TELLS = (
    "kernel results, HCCL between dies, memory handles shared between processes, graph capture and speed"
)


def torch_npu(machine: Machine, pins: Pins) -> list[Finding]:
    """Tries torch_npu out in a child process and compares the versions."""
    probe = machine.probe()
    findings = [_attempt(probe, pins), *_versions(probe, pins), *_operators(probe, pins)]
    if probe.state is ProbeState.BROKEN and machine.environment.get(AUTOLOAD) != "0":
        message = (
            "while torch_npu cannot be imported, every `import torch` fails too: torch loads it as a backend"
        )
        findings.append(Finding("torch-import", Status.WARNING, message, f"export {AUTOLOAD}=0 until it can"))
    if probe.state is not ProbeState.READY:
        findings.append(Finding("needs-a-device", Status.UNKNOWN, f"not looked at: {_ONLY_A_DEVICE_TELLS}"))
    return [
        *findings,
        *memory.device(probe),
        *mindspeed.find(machine, probe, pins),
        *combinations.find(machine, probe, pins),
    ]


def _operators(probe: Probe, pins: Pins) -> list[Finding]:
    """Which operators of relax-kernels the torch reference has to serve, and why."""
    if not probe.fla_npu:
        return []
    left = [c.operator for c in CAPABILITIES if set(c.needs) & set(probe.missing)]
    source = pins.sources["fla-npu"]
    fix = f"install fla_npu {source.release} at commit {source.commit[:12]}, as docker/Dockerfile.npu does"
    if left:
        message = f"{', '.join(left)} run as plain torch: missing {', '.join(probe.missing)}"
        if probe.fla_npu not in ("loaded", "absent"):
            message += f" (fla_npu does not load: {probe.fla_npu})"
        return [Finding("operators", Status.WARNING, message, fix)]
    return [Finding("operators", Status.OK, f"all {len(CAPABILITIES)} operators of ascend are there")]


def _attempt(probe: Probe, pins: Pins) -> Finding:
    """One finding for the state of the probe."""

    def error(message: str, fix: str) -> Finding:
        return Finding("torch-npu", Status.ERROR, message, fix)

    match probe.state:
        case ProbeState.READY:
            gib = probe.total_memory / 2**30
            message = f"torch_npu {probe.torch_npu} works: {probe.count} x {probe.name}, {gib:.1f} GiB each"
            return Finding("torch-npu", Status.OK, message)
        case ProbeState.NO_TORCH:
            return error("torch is not installed", f"{_INSTALL} (torch {pins.torch})")
        case ProbeState.TORCH_BROKEN:
            return error(f"torch cannot be imported: {probe.error}", f"reinstall torch {pins.torch}")
        case ProbeState.ABSENT:
            return error("torch_npu is not installed", f"{_INSTALL} (torch-npu {pins.torch_npu})")
        case ProbeState.BROKEN:
            fix = f"{_SET_ENV} (CANN {pins.cann}); if that is done, reinstall torch-npu {pins.torch_npu}"
            return error(f"torch_npu cannot be imported: {probe.error}", fix)
        case ProbeState.NO_DEVICE:
            fix = "compare with `npu-smi info`; see the findings on device files and visible devices"
            return error("torch_npu works, but sees no NPU", fix)
        case ProbeState.DEVICE_BROKEN:
            fix = "see `npu-smi info`: is the NPU healthy, and is its memory free?"
            return error(f"an NPU is there, but `{probe.stage}` failed: {probe.error}", fix)
        case ProbeState.CRASHED:
            fix = f"torch {pins.torch} and torch-npu {pins.torch_npu} must be of one build: {_INSTALL}"
            return error(f"`{probe.stage}` ended the process: {probe.error}", fix)
        case ProbeState.HUNG:
            fix = "see `npu-smi info` and the driver's log; reset the NPU, or allow more time with --timeout"
            return error(f"`{probe.stage}` hangs: {probe.error}", fix)


def _versions(probe: Probe, pins: Pins) -> list[Finding]:
    """Whether the installed pair is the pinned one. The local part of a version ("+cpu") is no difference."""
    found = {"torch": probe.torch, "torch-npu": probe.torch_npu}
    pinned = {"torch": pins.torch, "torch-npu": pins.torch_npu}
    wrong = [name for name, version in found.items() if version and version.partition("+")[0] != pinned[name]]
    if not all(found.values()):
        return []
    if not wrong:
        return [Finding("versions", Status.OK, f"torch {found['torch']} with torch-npu {found['torch-npu']}")]
    message = ", ".join(f"{name} {found[name]} instead of {pinned[name]}" for name in wrong)
    # torch_npu is compiled against one torch: another minor release of torch cannot load it.
    same_line = found["torch"].split(".")[:2] == found["torch-npu"].split(".")[:2]
    status = Status.WARNING if same_line else Status.ERROR
    return [Finding("versions", status, message, f"{_INSTALL}, the pair that is tested")]

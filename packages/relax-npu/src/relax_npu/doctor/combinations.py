"""Combinations that are known to be bad: each is there on its own, and not beside the other."""

from relax_npu.doctor.finding import Finding, Status
from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins
from relax_npu.probe import Probe

_EXPANDABLE = "expandable_segments:true"


def find(machine: Machine, probe: Probe, pins: Pins) -> list[Finding]:
    """One finding for each bad combination on a machine; one that says so when there is none."""
    bad = [*_of_variables(machine, probe), *_of_packages(probe, pins), *_of_chips(probe, pins)]
    return bad or [Finding("combinations", Status.OK, "none of the known bad ones")]


def _bad(status: Status, message: str, fix: str) -> Finding:
    return Finding("combinations", status, message, fix)


def _of_variables(machine: Machine, probe: Probe) -> list[Finding]:
    told = machine.environment
    found = []
    allocator = told.get("PYTORCH_NPU_ALLOC_CONF", "").replace(" ", "").lower()
    if _EXPANDABLE in allocator and "TMS_HOOK_MODE" in told:
        message = "expandable segments with torch_memory_saver (TMS_HOOK_MODE): memory given back is lost"
        found.append(_bad(Status.ERROR, message, "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:False"))
    if told.get("ASCEND_LAUNCH_BLOCKING") == "1":
        message = "ASCEND_LAUNCH_BLOCKING=1: SGLang cannot capture graphs, and every kernel waits"
        found.append(_bad(Status.WARNING, message, "unset ASCEND_LAUNCH_BLOCKING"))
    if told.get("TASK_QUEUE_ENABLE") == "2" and probe.fla_npu == "loaded":
        message = "TASK_QUEUE_ENABLE=2 with fla_npu: its kernels have been seen to give NaN"
        found.append(_bad(Status.WARNING, message, "export TASK_QUEUE_ENABLE=1"))
    if "SGLANG_ENABLE_SPEC_V2" in told:
        message = "SGLANG_ENABLE_SPEC_V2 is read by no SGLang from 0.5.15 on"
        found.append(_bad(Status.WARNING, message, "unset SGLANG_ENABLE_SPEC_V2"))
    if "HCCL_ASYNC_ERROR_HANDLING" in told:
        message = "HCCL_ASYNC_ERROR_HANDLING is not read any more"
        found.append(_bad(Status.WARNING, message, "export TORCH_HCCL_ASYNC_ERROR_HANDLING instead"))
    return found


def _of_packages(probe: Probe, pins: Pins) -> list[Finding]:
    have = probe.installed
    wanted = pins.packages["triton-ascend"]
    found = []
    if "triton" in have and "triton-ascend" in have:
        message = (
            f"triton {have['triton']} and triton-ascend {have['triton-ascend']} are one package `triton`"
        )
        fix = f"pip uninstall triton triton-ascend, then install triton-ascend {wanted} alone"
        found.append(_bad(Status.ERROR, message, fix))
    elif "triton" in have and probe.torch_npu:
        message = f"triton {have['triton']} is CUDA's: MindSpeed's and SGLang's kernels need triton-ascend"
        fix = f"pip uninstall triton, then install triton-ascend {wanted}"
        found.append(_bad(Status.WARNING, message, fix))
    if "triton-ascend" in have and have["triton-ascend"].split("+")[0] != wanted:
        message = f"triton-ascend {have['triton-ascend']} with CANN {pins.cann}, which {wanted} is made for"
        found.append(_bad(Status.WARNING, message, f"install triton-ascend {wanted}"))
    if "fla-core" in have and {"flash-linear-attention-npu", "fla-npu"} & set(have):
        message = (
            "fla-core and fla_npu both install the package `fla`; the later one has overwritten the other"
        )
        fix = "pip uninstall fla-core, then install fla_npu anew"
        found.append(_bad(Status.ERROR, message, fix))
    if probe.fla_npu and probe.fla_npu != "absent" and probe.torch_npu in ("2.9.0", "2.9.0.post2"):
        message = f"fla_npu refuses torch_npu {probe.torch_npu}: streams of its operators need 2.9.0.post3"
        found.append(_bad(Status.ERROR, message, f"install torch-npu {pins.torch_npu}"))
    if "mindspeed" in have and have.get("numpy", "1").split(".")[0] != "1":
        message = f"numpy {have['numpy']} with MindSpeed, which takes numpy 1"
        found.append(_bad(Status.WARNING, message, f"install numpy {pins.packages['numpy']}"))
    return found


def _of_chips(probe: Probe, pins: Pins) -> list[Finding]:
    family = pins.soc.lower()
    if not probe.name or probe.name.lower().startswith(family):
        return []
    message = f"{probe.name} is another chip than {pins.soc}, for which the image's operators are built"
    fix = "set `soc` and `sgl-soc` in pins.toml to this chip's names and build the image anew"
    return [_bad(Status.WARNING, message, fix)]

"""What `relax_npu.probe` runs in a child process: each stage is announced first, then done.

Standard library only, and no import of relax_npu: the parent runs this file by its path.
"""

import json
import sys
from importlib import import_module, metadata
from typing import Any

MARKER = "RELAX_NPU_PROBE "
DISTRIBUTIONS = (
    *("numpy", "triton", "triton-ascend", "fla-core", "flash-linear-attention-npu", "fla-npu", "mindspeed"),
    *("megatron-core", "sglang", "sgl-kernel-npu", "ray"),
)


def version_of(distribution: str) -> str:
    """The installed version of a distribution, or ""."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def cann_version() -> str:
    """CANN's own version as torch_npu reads it, or "" where that release has no such call."""
    try:
        return str(import_module("torch_npu.utils").get_cann_version(module="CANN"))
    except (ImportError, AttributeError):
        return ""


def load_fla_npu() -> str:
    """Says `loaded`, `absent`, or why it does not load; it must be loaded before the device is used."""
    try:
        import_module("fla_npu")
    except ModuleNotFoundError as error:
        return "absent" if error.name == "fla_npu" else describe(error)
    except Exception as error:
        return describe(error)
    return "loaded"


def mindspeed_features(switches: dict[str, Any]) -> list[str]:
    """The names of MindSpeed's features that are on with these switches; nothing is patched."""
    manager = import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    told = import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True)
    for name, value in switches.items():
        setattr(told, name, value)
    return sorted({str(f.feature_name) for f in manager.FEATURES_LIST if f.is_need_apply(told)})


def main() -> None:
    """Goes as far as it can; the last line printed says how far, and why not further."""
    switches, names = json.loads(sys.argv[1]), sys.argv[2:]
    report: dict[str, Any] = {"torch": version_of("torch"), "torch_npu": version_of("torch_npu")}

    def tell(**more: Any) -> None:
        report.update(more)
        # On a line of its own, whatever was printed before without an end.
        print("\n" + MARKER + json.dumps(report), flush=True)

    tell(stage="import torch")
    installed = {name: found for name in DISTRIBUTIONS if (found := version_of(name))}
    tell(installed=installed)
    # Exceptions of every kind are caught below, for any of them is what this process is there to report.
    try:
        torch = import_module("torch")
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        tell(state="no_torch" if absent else "torch_broken", error=describe(error))
        return
    tell(stage="import torch_npu")
    try:
        import_module("torch_npu")
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch_npu"
        tell(state="absent" if absent else "broken", error=describe(error))
        return
    tell(stage="import fla_npu", fla_npu=load_fla_npu())
    missing = [name for name in names if not hasattr(torch.ops.npu, name)]
    tell(stage="count devices", cann=cann_version(), missing=missing)
    try:
        count = int(torch.npu.device_count())
        if not count:
            tell(state="no_device")
        else:
            tell(stage="take NPU 0", count=count)
            torch.npu.set_device(0)
            found = torch.npu.get_device_properties(0)
            free = int(torch.npu.mem_get_info()[0])
            tell(state="ready", name=str(found.name), total_memory=int(found.total_memory), free_memory=free)
    except Exception as error:
        tell(state="device_broken", error=describe(error))
    if switches is not None and "mindspeed" in installed:
        # Answered already: what goes wrong from here on concerns MindSpeed alone.
        tell(mindspeed_error="reading its features ended the process")
        sys.argv = sys.argv[:1]
        try:
            tell(mindspeed=mindspeed_features(switches), mindspeed_error="")
        except Exception as error:
            tell(mindspeed_error=describe(error))


def describe(error: BaseException) -> str:
    """The types and texts of an exception and of what caused it, on one line."""
    parts = []
    seen: BaseException | None = error
    while seen is not None:
        parts.append(f"{type(seen).__name__}: {' '.join(str(seen).split())}")
        seen = seen.__cause__ or seen.__context__
    return " <- ".join(parts)[:2000]


if __name__ == "__main__":
    main()

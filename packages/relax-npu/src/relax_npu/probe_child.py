"""What `relax_npu.probe` runs in a child process: each stage is announced first, then done.

Standard library only, and no import of relax_npu: the parent runs this file by its path.
"""

import json
import sys
from importlib import import_module, metadata
from typing import Any

MARKER = "RELAX_NPU_PROBE "


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


def main() -> None:
    """Goes as far as it can; the last line printed says how far, and why not further."""
    report: dict[str, Any] = {"torch": version_of("torch"), "torch_npu": version_of("torch_npu")}

    def tell(**more: Any) -> None:
        report.update(more)
        print(MARKER + json.dumps(report), flush=True)

    tell(stage="import torch")
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
    missing = [name for name in sys.argv[1:] if not hasattr(torch.ops.npu, name)] if sys.argv[1:] else []
    tell(stage="count devices", cann=cann_version(), missing=missing)
    try:
        count = int(torch.npu.device_count())
        if not count:
            tell(state="no_device")
            return
        tell(stage="take NPU 0", count=count)
        torch.npu.set_device(0)
        found = torch.npu.get_device_properties(0)
        tell(state="ready", name=str(found.name), total_memory=int(found.total_memory))
    except Exception as error:
        tell(state="device_broken", error=describe(error))


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

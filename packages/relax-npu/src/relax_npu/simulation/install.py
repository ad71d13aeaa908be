"""Puts the simulated NPU and its packages into this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from relax_npu.schema import snapshot
from relax_npu.simulation import fla_npu_ops, hccl, registry, torch_npu_ops

TORCH_NPU = "2.9.0.post4"
FLA_NPU = "v26.6.0"


@dataclass(frozen=True)
class Simulation:
    """What was installed.

    Attributes:
        torch_npu: release whose schemas hold.
        fla_npu: release whose schemas hold; None when the package is not simulated.
        visible: NPUs that the process sees.
    """

    torch_npu: str
    fla_npu: str | None
    visible: int


_installed: Simulation | None = None


def install(*, torch_npu: str = TORCH_NPU, fla_npu: str | None = FLA_NPU, visible: int = 1) -> Simulation:
    """Makes this process one with a simulated NPU. For the rest of its life: torch takes one such device.

    Args:
        torch_npu: release to simulate, one of `relax_npu.schema.snapshots()`.
        fla_npu: the same for fla_npu; None to do without it.
        visible: NPUs that `torch.npu.device_count()` tells; all of them are this host.

    Raises:
        RuntimeError: torch is older than 2.11, a real torch_npu is loaded, or another simulation runs.
        ValueError: no such release is known.
    """
    global _installed
    wanted = Simulation(torch_npu, fla_npu, visible)
    if _installed is not None:
        if _installed != wanted:
            raise RuntimeError(f"this process simulates {_installed} already; start another one")
        return _installed
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu is loaded in this process; the simulation would take its place")
    if not hasattr(torch._C, "_acc"):
        raise RuntimeError(
            f"the simulated NPU needs torch 2.11, which takes devices in Python; {torch.__version__}"
        )
    # What an older torch has not is only imported behind the check.
    from relax_npu.simulation import device

    releases = [(snapshot("torch_npu", torch_npu), torch_npu_ops.KERNELS)]
    if fla_npu is not None:
        releases.append((snapshot("fla_npu", fla_npu), fla_npu_ops.KERNELS))
    npu = device.register(visible)
    for release, kernels in releases:
        registry.define(release, kernels)
    hccl.register()
    module = _module("torch_npu", __version__=torch_npu, npu=npu, is_simulated=True)
    for name in releases[0][0].schemas:
        setattr(module, name.partition(".")[0], getattr(torch.ops.npu, name))
    # A folder: `torch_npu.contrib.transfer_to_npu` acts when it is imported, as the real one does.
    _module("torch_npu.contrib").__path__ = [str(Path(__file__).with_name("contrib"))]
    if fla_npu is not None:
        _module("fla_npu", is_simulated=True)
    _installed = wanted
    return wanted


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return module

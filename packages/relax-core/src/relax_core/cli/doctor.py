"""`relax-train --doctor`: what is installed, which devices there are, what is corrected upstream."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from relax_core.run.summary import installed_versions


def doctor_lines() -> Iterator[str]:
    """Versions, devices and upstream corrections, as lines for a person."""
    yield "Versions"
    for name, found in installed_versions().items():
        yield f"  {name:<16}{found}"
    yield "Devices"
    yield from (f"  {line}" for line in _devices())
    yield "Cluster"
    yield f"  {_jobs()}"
    yield "Environment"
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        yield f"  {name:<26}{os.environ.get(name, 'not set')}"
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        yield f"  {name:<26}{'set' if os.environ.get(name) else 'not set'}"
    yield from _corrections()


def _jobs() -> str:
    if find_spec("aiohttp_cors") is None:
        return (
            "ray   without the server that takes `ray job submit`: pip install "
            f"'ray[default]=={version('ray')}' where `ray start --head` runs"
        )
    return "ray   a Ray started here takes `ray job submit`"


def _devices() -> Iterator[str]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    yield (
        f"cpu   {platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda  {index}: {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    else:
        yield f"cuda  none (torch built for CUDA {torch.version.cuda or '-'})"
    if find_spec("torch_npu") is None:
        yield "npu   none (torch-npu is not installed)"
    else:
        yield "npu   torch-npu is installed; `relax-npu doctor` shows the devices"


def _corrections() -> Iterator[str]:
    from relax_core.upstream import list_corrections

    corrections = list_corrections()
    yield f"Corrections of upstream packages ({len(corrections)})"
    for correction in corrections:
        yield f"  {correction.name}: {correction.distribution} {correction.versions}"
        yield f"      {correction.wrong}"
        if correction.thread:
            yield f"      {correction.thread}"

"""The Ascend NPU backend of Relax: importable everywhere, honest about what a device must confirm.

Nothing here imports torch or torch_npu on import, for an installed torch_npu without CANN breaks both.

>>> from relax_npu import parse_visible
>>> parse_visible("0,2,3")
(0, 2, 3)
"""

from importlib.metadata import version

from relax_npu.allocator import allocator_problems
from relax_npu.device import NpuDevice, NpuMemory, NpuUnavailableError
from relax_npu.hccl import PortRangeError, hccl_environment, parse_ports
from relax_npu.probe import Probe, ProbeState, probe
from relax_npu.visible import VisibleDevicesError, format_visible, logical_index, parse_visible

__version__ = version("relax-npu")

__all__ = [
    "NpuDevice",
    "NpuMemory",
    "NpuUnavailableError",
    "PortRangeError",
    "Probe",
    "ProbeState",
    "VisibleDevicesError",
    "__version__",
    "allocator_problems",
    "format_visible",
    "hccl_environment",
    "logical_index",
    "parse_ports",
    "parse_visible",
    "probe",
]

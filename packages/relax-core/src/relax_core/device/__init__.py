"""The device a trainer runs on: `cpu`, `cuda`, or one that another package adds.

Importing this package stays free of torch: `relax-train --help` reads `ParallelConfig`.

>>> from relax_core.device import initialise, shutdown
>>> world = initialise("cpu")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from relax_core.device.parallel import ParallelConfig
from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.device.launch import World, initialise, seed_all, shutdown
    from relax_core.device.protocol import Device, DeviceMemory
    from relax_core.device.registry import UnknownDeviceError, device_names, get_device

__all__ = [
    "Device",
    "DeviceMemory",
    "ParallelConfig",
    "UnknownDeviceError",
    "World",
    "device_names",
    "get_device",
    "initialise",
    "seed_all",
    "shutdown",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Device": "protocol",
        "DeviceMemory": "protocol",
        "UnknownDeviceError": "registry",
        "World": "launch",
        "device_names": "registry",
        "get_device": "registry",
        "initialise": "launch",
        "seed_all": "launch",
        "shutdown": "launch",
    },
)

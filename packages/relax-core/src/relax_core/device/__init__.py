"""The device a trainer runs on: `cpu`, `cuda`, or one that another package adds.

>>> from relax_core.device import initialise, shutdown
>>> world = initialise("cpu")  # doctest: +SKIP
"""

from relax_core.device.launch import World, initialise, seed_all, shutdown
from relax_core.device.parallel import ParallelConfig
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

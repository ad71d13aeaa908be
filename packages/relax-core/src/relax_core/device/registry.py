"""Finds a device by name through the entry-point group `relax_core.devices`."""

import functools
from importlib.metadata import EntryPoint, entry_points

from relax_core.device.protocol import Device

GROUP = "relax_core.devices"
_BUILT_IN = {"cpu": "relax_core.device.cpu:CpuDevice", "cuda": "relax_core.device.cuda:CudaDevice"}


class UnknownDeviceError(ValueError):
    """No device of that name is installed."""


def device_names() -> tuple[str, ...]:
    """The names of all installed devices, sorted."""
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))}))


def _members(protocol: type) -> list[str]:
    """What a class must have to be a `protocol`."""
    return sorted({*protocol.__annotations__, *(n for n in vars(protocol) if not n.startswith("_"))})


@functools.cache
def get_device(name: str) -> Device:
    """The device called `name`, one object per process.

    Raises:
        UnknownDeviceError: naming the installed devices.
        TypeError: the entry point does not give a `Device`.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    found.update({key: EntryPoint(key, value, GROUP) for key, value in _BUILT_IN.items()})
    if name not in found:
        raise UnknownDeviceError(
            f"device {name!r} is not installed; installed: {', '.join(device_names())}. "
            f"A package adds one through the entry-point group {GROUP!r}"
        )
    device = found[name].load()()
    if not isinstance(device, Device):
        missing = [member for member in _members(Device) if not hasattr(device, member)]
        raise TypeError(
            f"entry point {name!r} of {GROUP!r} gives {type(device).__name__}, not a Device: "
            f"it lacks {', '.join(missing)}"
        )
    return device


def choose_device(wanted: str) -> str:
    """The device's name: `auto` takes npu, then cuda, then cpu."""
    if wanted != "auto":
        return wanted
    accelerators = (name for name in ("npu", "cuda") if name in device_names())
    return next((name for name in accelerators if get_device(name).available()), "cpu")

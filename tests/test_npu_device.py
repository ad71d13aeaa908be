"""relax-npu's device is a device of relax-core, though neither imports the other."""

import dataclasses
import inspect

import pytest
from relax_core.device import Device, DeviceMemory, device_names, get_device
from relax_npu import NpuDevice, NpuMemory, NpuUnavailableError


def test_it_is_found_by_name() -> None:
    assert "npu" in device_names()
    assert isinstance(get_device("npu"), NpuDevice)
    assert isinstance(get_device("npu"), Device)


def test_its_methods_take_what_the_protocol_says() -> None:
    wanted = {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(Device, inspect.isfunction)
        if not name.startswith("_")
    }
    assert set(wanted) >= {"prepare", "init", "seed", "memory", "visible_ids"}
    for name, signature in wanted.items():
        assert inspect.signature(getattr(NpuDevice, name)).parameters == signature.parameters, name


def test_it_has_the_attributes_of_the_protocol() -> None:
    assert not [name for name in Device.__annotations__ if not hasattr(NpuDevice(), name)]


def test_its_memory_has_the_fields_of_the_trainers() -> None:
    assert [f.name for f in dataclasses.fields(NpuMemory)] == [
        f.name for f in dataclasses.fields(DeviceMemory)
    ]


def test_without_an_npu_it_fails_late_and_says_what_to_do() -> None:
    with pytest.raises(NpuUnavailableError, match="relax-npu doctor"):
        get_device("npu").init()

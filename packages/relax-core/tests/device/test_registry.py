"""Devices are found by name; other packages add theirs through an entry point."""

from importlib.metadata import EntryPoint

import pytest
import torch
from relax_core.device import Device, UnknownDeviceError, device_names, get_device, registry


class FakeNpu:
    name = "fake_npu"
    torch_type = "cpu"
    collective_backend = "gloo"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    deterministic_variables = {}  # noqa: RUF012

    def __getattr__(self, name):
        return lambda *args: None


def test_cpu_and_cuda_are_built_in_and_are_devices():
    assert {"cpu", "cuda"} <= set(device_names())
    assert isinstance(get_device("cpu"), Device)
    assert isinstance(get_device("cuda"), Device)
    assert get_device("cpu") is get_device("cpu")


def test_an_unknown_name_lists_the_installed_ones():
    with pytest.raises(UnknownDeviceError, match=r"'tpu' is not installed; installed: .*cpu, cuda"):
        get_device("tpu")


def test_another_package_plugs_a_device_in(monkeypatch):
    entry = EntryPoint("fake_npu", f"{__name__}:FakeNpu", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: FakeNpu)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    get_device.cache_clear()
    assert "fake_npu" in device_names()
    assert get_device("fake_npu").visible_variable == "ASCEND_RT_VISIBLE_DEVICES"
    get_device.cache_clear()


def test_an_entry_point_that_is_no_device_is_refused(monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda self: dict)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("bad", "builtins:dict", group)])
    get_device.cache_clear()
    with pytest.raises(
        TypeError,
        match=r"gives dict, not a Device: it lacks available, before_megatron, .*visible_variable",
    ):
        get_device("bad")
    get_device.cache_clear()


def test_cpu_memory_is_this_process_in_bytes():
    device = get_device("cpu")
    before = device.memory()
    held = torch.ones(64 * 2**20 // 4)
    after = device.memory()
    assert after.allocated - before.allocated > 48 * 2**20
    assert after.peak >= after.allocated - 2**20
    assert after.total > after.peak
    assert device.visible_ids() == ("0",)
    del held


def test_cuda_lists_its_visible_ids(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert get_device("cuda").visible_ids() == ("2", "5")


def test_cpu_is_always_available_and_cuda_when_torch_sees_a_gpu(monkeypatch):
    assert get_device("cpu").available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not get_device("cuda").available()


def test_a_rank_without_a_gpu_is_told_what_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="local rank 1 needs 2 GPUs, but torch sees 1"):
        get_device("cuda").init(1)

"""Profiles and snapshots of memory: which steps, which files, and what the device is asked."""

import json
import logging
from contextlib import contextmanager

import pytest
from relax_core.device import Device, get_device
from relax_core.loop import run
from relax_core.loop.watch import Watch, in_window, watches
from relax_core.run import RunDirectory
from relax_core.run.config import RunConfig


class Chip:
    """A device that keeps a history of its memory, and remembers what it was asked."""

    name = "chip"

    def __init__(self):
        self.asked = []

    def synchronize(self):
        pass

    def record_memory(self, on):
        self.asked.append(("record", on))
        return True

    def dump_memory(self, file):
        self.asked.append(("dump", file.name))
        file.write_bytes(b"history")

    @contextmanager
    def profile(self, folder, name):
        self.asked.append(("profile", name))
        yield
        (folder / f"{name}.json").write_text("{}")


def test_only_the_steps_of_the_window_are_profiled(small_run, tmp_path):
    config = small_run(
        run={"steps": 3, "profile_from": 2}, eval={"before": False, "after": False}, checkpoint={"every": 0}
    )
    with RunDirectory.create(tmp_path / "run", config) as directory:
        assert run(config, directory, resume=False) == "finished"
    (file,) = (directory.path / "profile").iterdir()
    assert file.name == "step_2.json"
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names, "sampling and training"


@pytest.mark.parametrize(
    ("step", "profiled", "recorded"), [(2, 0, 0), (3, 1, 0), (4, 1, 1), (5, 0, 1), (6, 0, 0)]
)
def test_the_windows_of_profiler_and_memory_are_their_own(tmp_path, step, profiled, recorded):
    config = RunConfig(profile_from=3, profile_steps=2, memory_from=4, memory_steps=2)
    assert watches(config)
    assert in_window(config, step) == bool(profiled or recorded)
    chip = Chip()
    watch = Watch(config, chip, 1, 2)
    watch.open(tmp_path)
    watch.begin(step)
    watch.end()
    watch.close()
    profile, memory = (tmp_path / "profile", tmp_path / "memory")
    assert [file.name for file in profile.glob("*")] == [f"step_{step}_rank1.json"] * profiled
    assert [file.name for file in memory.glob("*")] == [f"step_{step}_rank1.pickle"] * recorded
    history = [("record", True), ("dump", f"step_{step}_rank1.pickle"), ("record", False)]
    assert [ask for ask in chip.asked if ask[0] != "profile"] == history * recorded


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_memory_was_used_for_is_written_when_it_runs_out(tmp_path, error, written):
    chip = Chip()
    watch = Watch(RunConfig(memory_snapshot=True), chip, 0, 1)
    watch.open(tmp_path)
    with pytest.raises(type(error)), watch.memory():
        raise error
    assert (tmp_path / "memory" / "out_of_memory.pickle").exists() == written
    watch.close()
    assert chip.asked[0] == ("record", True)
    assert chip.asked[-1] == ("record", False)


def test_without_being_asked_nothing_is_kept_or_written(tmp_path):
    chip = Chip()
    watch = Watch(RunConfig(), chip, 0, 1)
    with pytest.raises(MemoryError), watch.memory():
        raise MemoryError
    watch.close()
    assert chip.asked == []
    assert not watches(RunConfig())


def test_a_step_that_fails_leaves_no_profile_and_no_profiler(tmp_path):
    chip = Chip()
    watch = Watch(RunConfig(profile_from=1), chip, 0, 1)
    watch.open(tmp_path)
    watch.begin(1)
    watch.close()
    watch.close()
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_device_without_a_history_says_so_once_and_writes_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    watch = Watch(RunConfig(memory_from=1), get_device("cpu"), 0, 1)
    watch.open(tmp_path)
    watch.begin(1)
    watch.end()
    assert caplog.text.count("the device cpu keeps no history of its memory") == 1
    assert not (tmp_path / "memory").exists()


def test_the_allocator_of_cuda_is_asked_for_its_history(tmp_path, monkeypatch):
    """No GPU is needed to see what torch is asked."""
    import torch

    asked = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: asked.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", asked.append)
    device: Device = get_device("cuda")
    assert device.record_memory(True)
    device.dump_memory(tmp_path / "a.pickle")
    device.record_memory(False)
    assert [how if isinstance(how, str) else how["enabled"] for how in asked] == [
        "all",
        str(tmp_path / "a.pickle"),
        None,
    ]

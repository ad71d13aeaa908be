"""The real torch_npu with and without a CANN to load: what the probe, the device and the doctor make of it.

Each test runs processes of its own: importing torch_npu and its transfer cannot be undone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch_npu
from relax_npu import ProbeState, probe
from relax_npu.doctor import Machine, Status, software
from relax_npu.pins import load_pins

PINS = load_pins()
WITHOUT = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}


def run(program: str, *arguments: str, **environment: str) -> object:
    """What a program prints as JSON in its last line; its environment is this one with some changes."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_probe_takes_a_device_of_the_real_torch_npu() -> None:
    found = probe(timeout_s=400)
    assert found.state is ProbeState.READY, found
    assert (found.torch_npu, found.count, found.name) == (PINS.torch_npu, 2, "Ascend910_9391")
    assert found.total_memory == 64 * 2**30
    assert found.torch.partition("+")[0] == PINS.torch


def test_without_a_device_the_probe_says_so() -> None:
    assert probe(environment=os.environ | {"RELAX_STUB_NPUS": "0"}).state is ProbeState.NO_DEVICE


def test_without_cann_the_probe_names_the_library() -> None:
    found = probe(environment=WITHOUT)
    assert found.state is ProbeState.BROKEN
    assert "libhccl.so" in found.error
    for finding in software.torch_npu(Machine(environment=WITHOUT, probe=lambda: found), PINS):
        if finding.status in (Status.ERROR, Status.WARNING):
            assert finding.fix


def test_without_cann_torch_itself_cannot_be_imported_unless_backends_stay_out() -> None:
    """What the doctor tells about `import torch`, on the real packages."""
    command = [sys.executable, "-c", "import torch"]
    broken = subprocess.run(command, env=WITHOUT, capture_output=True, text=True, check=False)
    assert broken.returncode != 0
    assert "Failed to load the backend extension: torch_npu" in broken.stderr
    spared = WITHOUT | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run(command, env=spared, check=False).returncode == 0


DEVICE = """
import json
from relax_npu import NpuDevice
device = NpuDevice()
try:
    device.init(2)
except ValueError as error:
    refused = str(error)
taken = device.init(1)
import torch
held = torch.ones(1000, device=taken)
memory = device.memory()
device.seed(2**32 + 5)
first = torch.npu.initial_seed()
device.seed(2**32 + 5)
device.synchronize(); device.reset_peak_memory(); device.empty_cache()
with device.stream():
    inside = torch.npu.current_stream() != torch.npu.default_stream()
print(json.dumps([str(taken), device.available(), memory.allocated >= 4000, memory.total, first, inside,
    device.visible_ids(), str(torch.zeros(2).cuda().device), torch.cuda.current_device(),
    torch.zeros(1, device="cuda").type(), torch.npu.is_initialized(), refused]))
"""


def test_every_method_of_the_device_reaches_the_real_torch_npu() -> None:
    taken, available, allocated, total, seed, inside, ids, moved, current, kind, started, refused = run(
        DEVICE
    )
    assert (taken, available, allocated, total, started) == ("npu:1", True, True, 64 * 2**30, True)
    assert seed == 2**32 + 5
    assert inside, "the context's stream is another than the default one"
    assert ids == ["0", "1"]
    assert (moved, current, kind) == ("npu:1", 1, "torch.npu.FloatTensor"), "the transfer is in place"
    assert "needs 3 NPUs, but 2 are visible" in refused


MEGATRON = """
import json, sys, types
import torch
# As megatron-core's module does it, before the transfer.
early = types.ModuleType("megatron.core.early")
sys.modules["megatron"] = types.ModuleType("megatron")
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
sys.modules[early.__name__] = early
exec("from torch.cuda import _lazy_call, current_device, Stream\\ndef kind(x): return x.type()", vars(early))
before = early.current_device
from relax_npu import NpuDevice
device = NpuDevice()
device.init(1)
x = torch.ones(2, device="npu")
told = [early.current_device is not before, early.current_device(), early.kind(x), x.type()]
import torch.distributed as dist
dist.init_process_group(device.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
told += [dist.is_hccl_available(), dist.get_backend(), dist.get_world_size()]
print(json.dumps(told), flush=True)
import os; os._exit(0)
"""


def test_megatron_means_the_npu_and_hccl_is_the_group_of_its_collectives() -> None:
    """What megatron took from torch before the transfer follows it."""
    kinds = ["torch.cuda.FloatTensor", "torch.npu.FloatTensor"]
    assert run(MEGATRON) == [True, 1, *kinds, True, "hccl", 1]


WATCHED = """
import json, pickle, sys
from pathlib import Path
from relax_npu import NpuDevice
device, folder = NpuDevice(), Path(sys.argv[1])
device.init(0)
import torch
kept = device.record_memory(True)
held = torch.ones(1000, device="npu")
device.dump_memory(folder / "a.pickle")
device.record_memory(False)
found = pickle.loads((folder / "a.pickle").read_bytes())
with device.profile(folder, "step_3"):
    held += 1
folders = [path.name for path in folder.iterdir() if path.is_dir()]
print(json.dumps([device.chip(), kept, sorted(found), folders]))
"""


def test_profiles_and_snapshots_of_memory_are_made_by_the_real_torch_npu(tmp_path: Path) -> None:
    """Without a driver the profile is empty; that it is asked for as the library wants it is seen."""
    chip, kept, parts, folders = run(WATCHED, str(tmp_path))
    assert (chip, kept) == ("Ascend910_9391", True)
    assert {"segments", "device_traces"} <= set(parts)
    assert all(name.startswith("step_3_") for name in folders)


def test_the_profiler_has_the_names_of_its_documentation() -> None:
    wanted = ("profile", "ProfilerActivity", "schedule", "tensorboard_trace_handler", "_ExperimentalConfig")
    assert not [name for name in wanted if not hasattr(torch_npu.profiler, name)]

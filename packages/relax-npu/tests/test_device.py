"""The device works on a working stack, and says late and clearly why it does not on another."""

from importlib.metadata import entry_points

import pytest
from relax_npu import NpuDevice

TRANSFER = "import torch; torch.calls.append(('transfer',))"


@pytest.fixture
def working(bench):
    bench.torch()
    bench.torch_npu()
    bench.module("torch_npu.contrib.transfer_to_npu", TRANSFER)
    seed = "random = types.SimpleNamespace(seed=lambda seed: torch.calls.append(('numpy', seed)))"
    bench.module("numpy", f"import types, torch\n{seed}")
    return bench


def test_the_entry_point_gives_the_device() -> None:
    (entry,) = entry_points(group="relax_core.devices", name="npu")
    assert entry.load() is NpuDevice
    device = entry.load()()
    assert (device.name, device.torch_type, device.collective_backend) == ("npu", "npu", "hccl")
    assert device.visible_variable == "ASCEND_RT_VISIBLE_DEVICES"


def test_making_one_needs_nothing_and_two_share_nothing(bench) -> None:
    source = """
        from relax_npu import NpuDevice
        one, two = NpuDevice(), NpuDevice()
        one.deterministic_variables.clear()
        answer = two.deterministic_variables
    """
    assert bench.tell(source) == {"HCCL_DETERMINISTIC": "True", "CLOSE_MATMUL_K_SHIFT": "1"}


def test_init_installs_the_transfer_and_takes_the_npu_of_the_rank(working) -> None:
    source = """
        from relax_npu import NpuDevice
        device = NpuDevice().init(1)
        import torch
        answer = [device.type, device.index, torch.calls]
    """
    assert working.tell(source) == ["npu", 1, [["transfer"], ["set_device", 1]]]


def test_methods_reach_torch_npu(working) -> None:
    source = """
        from dataclasses import asdict
        from relax_npu import NpuDevice
        device = NpuDevice()
        device.seed(2**32 + 5)
        device.synchronize(); device.reset_peak_memory(); device.empty_cache()
        with device.stream() as stream: pass
        import random, torch
        answer = [torch.calls, asdict(device.memory()), stream, device.visible_ids(), random.random()]
    """
    calls, memory, stream, ids, drawn = working.tell(source)
    seed = 2**32 + 5
    assert calls == [
        ["numpy", 5],
        ["torch.manual_seed", seed],
        ["npu.manual_seed_all", seed],
        ["synchronize"],
        ["reset_peak"],
        ["empty_cache"],
    ]
    assert memory == {"allocated": 3, "reserved": 5, "peak": 4, "total": 64 * 2**30}
    assert stream == "new stream"
    assert ids == ["0", "1"]
    import random

    assert drawn == random.Random(seed).random()


PROFILER = """
    import enum, torch
    class ProfilerActivity(enum.Enum):
        CPU, NPU = 0, 1
    def tensorboard_trace_handler(dir_name, worker_name): return dir_name, worker_name
    class profile:
        def __init__(self, *, activities, on_trace_ready):
            self.told = ["profile", [one.name for one in activities], on_trace_ready]
        def __enter__(self): torch.calls.append(self.told)
        def __exit__(self, *error): torch.calls.append(["profiled", error[0] is None])
"""
MEMORY = """
    import torch
    def _record_memory_history(enabled, max_entries): torch.calls.append(["record", enabled, max_entries])
    def _snapshot(): return {"segments": [1]}
    def _dump_snapshot(filename): raise AssertionError("its file can be read by root alone")
"""


def test_profiles_and_memory_go_through_torch_npu_s_own(working, tmp_path) -> None:
    working.module("torch_npu.profiler", PROFILER)
    working.module("torch_npu.npu.memory", MEMORY)
    source = f"""
        import pickle
        from pathlib import Path
        from relax_npu import NpuDevice
        device, file = NpuDevice(), Path({str(tmp_path)!r}) / "a.pickle"
        with device.profile(Path("there"), "step_3"): pass
        kept = device.record_memory(True)
        device.dump_memory(file)
        device.record_memory(False)
        import torch
        answer = [device.chip(), kept, pickle.loads(file.read_bytes()), torch.calls]
    """
    chip, kept, snapshot, calls = working.tell(source)
    assert (chip, kept, snapshot) == ("Ascend910_9391", True, {"segments": [1]})
    profile, profiled, record, forget = calls
    assert profile == ["profile", ["CPU", "NPU"], ["there", "step_3"]]
    assert profiled == ["profiled", True]
    assert record[:2] == ["record", "all"]
    assert 0 < record[2] < 10**7, "not without end"
    assert forget[:2] == ["record", None]


def test_visible_ids_are_the_physical_ones_of_the_variable(bench) -> None:
    source = "from relax_npu import NpuDevice; answer = NpuDevice().visible_ids()"
    assert bench.tell(source, ASCEND_RT_VISIBLE_DEVICES="3,7") == ["3", "7"]


FAILS = """
    from relax_npu import NpuDevice
    try:
        NpuDevice().init({rank})
        answer = None
    except Exception as error:
        answer = [type(error).__name__, str(error)]
"""


@pytest.mark.parametrize(
    ("torch", "torch_npu", "told"),
    [
        (None, None, "No module named 'torch'"),
        ("works", None, "No module named 'torch_npu'"),
        ("works", "raise ImportError('libhccl.so')", "ImportError: libhccl.so"),
        ("works", "raise OSError('libascendcl.so')", "OSError: libascendcl.so"),
        (
            "raise RuntimeError('Failed to load the backend extension: torch_npu')",
            None,
            "RuntimeError: Failed to load",
        ),
    ],
    ids=["no torch", "no torch_npu", "no CANN", "no CANN, OSError", "torch breaks on its backend"],
)
def test_a_broken_stack(bench, torch: str | None, torch_npu: str | None, told: str) -> None:
    if torch:
        bench.torch(source=bench.torch_source if torch == "works" else torch)
    if torch_npu:
        bench.torch_npu(source=torch_npu)
    kind, message = bench.tell(FAILS.format(rank=0))
    assert kind == "NpuUnavailableError"
    assert told in message
    assert "relax-npu doctor" in message


def test_no_npu_visible(working) -> None:
    kind, message = working.tell(FAILS.format(rank=0), FAKE_NPUS="0")
    assert kind == "NpuUnavailableError"
    assert "ASCEND_RT_VISIBLE_DEVICES=unset" in message


def test_more_ranks_than_npus(working) -> None:
    kind, message = working.tell(FAILS.format(rank=2), ASCEND_RT_VISIBLE_DEVICES="4,5")
    assert kind == "ValueError"
    assert "needs 3 NPUs, but 2 are visible (ASCEND_RT_VISIBLE_DEVICES=4,5)" in message


def test_a_malformed_list_is_refused_before_torch_npu_reads_it(bench) -> None:
    kind, message = bench.tell(FAILS.format(rank=0), ASCEND_RT_VISIBLE_DEVICES="1,0")
    assert kind == "VisibleDevicesError"
    assert "set ASCEND_RT_VISIBLE_DEVICES=0,1" in message


AVAILABLE = """
    import io, logging
    told = io.StringIO()
    logging.basicConfig(stream=told)
    from relax_npu import NpuDevice
    answer = [NpuDevice().available(), told.getvalue()]
"""


def test_an_npu_is_available_where_one_can_be_taken(working) -> None:
    assert working.tell(AVAILABLE) == [True, ""]


def test_none_is_available_where_torch_npu_is_not_installed(bench) -> None:
    assert bench.tell(AVAILABLE) == [False, ""]


@pytest.mark.parametrize(
    ("torch_npu", "variables", "told"),
    [
        ("raise ImportError('libhccl.so')", {}, "broken at `import torch_npu` ImportError: libhccl.so"),
        ("import os; os.abort()", {}, "crashed at `import torch_npu` killed by SIGABRT"),
        ("works", {"FAKE_NPUS": "0"}, "no_device at `count devices`"),
        ("works", {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "do not ascend"),
    ],
)
def test_a_torch_npu_that_is_not_used_is_told_about(
    bench, torch_npu: str, variables: dict, told: str
) -> None:
    bench.torch()
    bench.torch_npu(source=bench.torch_npu_source if torch_npu == "works" else torch_npu)
    available, log = bench.tell(AVAILABLE, **variables)
    assert not available
    assert told in log

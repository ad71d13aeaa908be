"""The probe names the state of every kind of broken install, from a process that stays whole."""

import textwrap
import time

import pytest


def test_nothing_installed(bench) -> None:
    found = bench.probe()
    assert (found["state"], found["stage"]) == ("no_torch", "import torch")


def test_torch_alone(bench) -> None:
    bench.torch("2.11.0")
    found = bench.probe()
    assert (found["state"], found["torch"], found["torch_npu"]) == ("absent", "2.11.0", "")


def test_torch_itself_broken(bench) -> None:
    bench.torch(source="raise OSError('libtorch_global_deps.so: cannot open shared object file')")
    found = bench.probe()
    assert found["state"] == "torch_broken"
    assert "libtorch_global_deps.so" in found["error"]


def test_a_module_that_torch_misses_is_no_missing_torch(bench) -> None:
    bench.torch(source="import typing_extensions")
    assert bench.probe()["state"] == "torch_broken"


def test_the_cause_is_told_with_the_error(bench) -> None:
    bench.torch()
    bench.torch_npu(source="raise RuntimeError('no backend') from ImportError('libhccl.so')")
    assert bench.probe()["error"] == "RuntimeError: no backend <- ImportError: libhccl.so"


@pytest.mark.parametrize(
    "error",
    ["ImportError('libhccl.so')", "OSError('libascendcl.so')", "RuntimeError('no CANN')", "KeyError('x')"],
)
def test_torch_npu_without_cann(bench, error: str) -> None:
    bench.torch()
    bench.torch_npu(source=f"raise {error}")
    found = bench.probe()
    assert (found["state"], found["stage"]) == ("broken", "import torch_npu")
    assert found["error"].startswith(error.partition("(")[0])
    assert (found["torch"], found["torch_npu"]) == ("2.9.0", "2.9.0.post4")


def test_a_module_that_torch_npu_misses_is_no_missing_torch_npu(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import yaml")
    found = bench.probe()
    assert found["state"] == "broken"
    assert "yaml" in found["error"]


def test_torch_that_loads_a_broken_backend_by_itself_is_told_from_a_broken_torch(bench) -> None:
    autoload = """
        import os
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0":
            raise RuntimeError("Failed to load the backend extension: torch_npu")
    """
    bench.torch(source=autoload)
    bench.torch_npu(source=bench.no_cann)
    assert bench.run("-c", "import torch").returncode != 0
    found = bench.probe()
    assert (found["state"], found["stage"]) == ("broken", "import torch_npu")
    assert "libhccl.so" in found["error"]


def test_an_abort_of_the_process(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import os; print('vector::reserve', flush=True); os.abort()")
    found = bench.probe()
    assert (found["state"], found["stage"]) == ("crashed", "import torch_npu")
    assert "SIGABRT" in found["error"]


def test_a_process_that_exits_without_a_word(bench) -> None:
    bench.torch()
    bench.torch_npu(
        source="import os, sys; sys.stderr.write('EZ9999: inner error'); sys.stderr.flush(); os._exit(7)"
    )
    found = bench.probe()
    assert found["state"] == "crashed"
    assert found["error"] == "exit code 7: EZ9999: inner error"


def test_a_driver_that_hangs(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import time; time.sleep(600)")
    found = bench.probe(timeout_s=5)
    assert (found["state"], found["stage"]) == ("hung", "import torch_npu")
    assert "no answer within 5 s" in found["error"]


def test_no_device(bench) -> None:
    bench.torch()
    bench.torch_npu()
    assert bench.probe(FAKE_NPUS="0")["state"] == "no_device"


def test_a_device_that_cannot_be_taken(bench) -> None:
    bench.torch()
    bench.torch_npu(
        source=bench.torch_npu_source
        + "\n    def refuse(index): raise RuntimeError('507899')\n    npu.set_device = refuse"
    )
    found = bench.probe()
    assert (found["state"], found["stage"], found["count"]) == ("device_broken", "take NPU 0", 2)
    assert "507899" in found["error"]


def test_a_working_stack(bench) -> None:
    bench.torch("2.9.0+cpu", "print('a word of torch')\n" + textwrap.dedent(bench.torch_source))
    bench.torch_npu()
    bench.module("torch_npu.utils", "def get_cann_version(module): return '9.0.0'")
    found = bench.probe()
    assert found == {
        "state": "ready",
        "stage": "take NPU 0",
        "error": "",
        "torch": "2.9.0+cpu",
        "torch_npu": "2.9.0.post4",
        "cann": "9.0.0",
        "count": 2,
        "name": "Ascend910_9391",
        "total_memory": 64 * 2**30,
        "fla_npu": "absent",
        "missing": [],
        "free_memory": 60 * 2**30,
        "installed": {},
        "mindspeed": [],
        "mindspeed_error": "",
    }


def test_importing_relax_npu_touches_neither_torch_nor_numpy(bench) -> None:
    for name in ("torch", "torch_npu", "numpy"):
        bench.module(name, f"raise OSError('{name} was imported')")
    source = "import relax_npu, relax_npu.cli, sys; answer = [relax_npu.__version__, 'torch' in sys.modules]"
    assert bench.tell(source) == ["0.1.0", False]


MINDSPEED = {
    "mindspeed.features_manager.features_manager": """
        class Feature:
            def __init__(self, name): self.feature_name = name
            def is_need_apply(self, args): return bool(getattr(args, self.feature_name, False))
        class MindSpeedFeaturesManager:
            FEATURES_LIST = [Feature("use_flash_attn"), Feature("affinity"), Feature("use_flash_attn")]
    """,
    "mindspeed.args_utils": """
        import sys
        from argparse import Namespace
        def get_mindspeed_args(get_defaults):
            assert get_defaults and not sys.argv[1:]
            return Namespace(affinity=True)
    """,
}
WITH_MINDSPEED = """
    from dataclasses import asdict
    import relax_npu
    answer = asdict(relax_npu.probe(timeout_s=30, mindspeed={"use_flash_attn": True}))
"""


def test_the_features_of_mindspeed_are_read(bench) -> None:
    bench.torch()
    bench.torch_npu()
    for name, source in MINDSPEED.items():
        bench.module(name, source)
    bench.distribution("mindspeed", "0.16.0")
    found = bench.tell(WITH_MINDSPEED)
    assert found["state"] == "ready"
    assert found["mindspeed"] == ["affinity", "use_flash_attn"]
    assert found["installed"] == {"mindspeed": "0.16.0"}
    assert bench.probe()["mindspeed"] == [], "not asked for"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ImportError('no torchair')", "ImportError: no torchair"),
        ("import os; os.abort()", "ended the process"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_a_mindspeed_that_breaks_does_not_hide_a_device_that_works(bench, source: str, told: str) -> None:
    bench.torch()
    bench.torch_npu()
    bench.module("mindspeed.features_manager.features_manager", source)
    bench.distribution("mindspeed", "0.16.0")
    found = bench.tell(WITH_MINDSPEED.replace("timeout_s=30", "timeout_s=5"))
    assert found["state"] == "ready"
    assert told in found["mindspeed_error"]


def test_a_process_that_torch_npu_leaves_behind_is_not_waited_for(bench) -> None:
    bench.torch()
    source = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
        raise ImportError("libhccl.so")
    """
    bench.torch_npu(source=source)
    started = time.monotonic()
    found = bench.probe(timeout_s=60)
    assert time.monotonic() - started < 15
    assert (found["state"], found["error"]) == ("broken", "ImportError: libhccl.so")


def test_bytes_without_an_end_hide_no_report(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import os; os.write(1, b'\\xff\\xfe noise'); raise OSError('libascendcl.so')")
    assert bench.probe()["error"] == "OSError: libascendcl.so"


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("raise SystemExit(3)", "crashed"),
        ("import os; os._exit(0)", "crashed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("def", "broken"),
        ("import torch", "device_broken"),
    ],
)
def test_other_ways_to_break(bench, source: str, state: str) -> None:
    bench.torch()
    bench.torch_npu(source=source)
    assert bench.probe()["state"] == state


def test_a_line_that_is_cut_off_hides_no_report_before_it(bench) -> None:
    bench.torch()
    bench.torch_npu(source="import os; print('\\nRELAX_NPU_PROBE {\"state', flush=True); os._exit(3)")
    found = bench.probe()
    assert (found["state"], found["stage"]) == ("crashed", "import torch_npu")

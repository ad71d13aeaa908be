"""Real MindSpeed on the real torch_npu, where its sources are: RELAX_TEST_MINDSPEED names a checkout.

git clone --branch core_r0.16.0 https://github.com/Ascend/MindSpeed
RELAX_TEST_MINDSPEED=$PWD/MindSpeed nox -s npu_stub -- -k mindspeed
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = os.environ.get("RELAX_TEST_MINDSPEED", "")
pytestmark = pytest.mark.skipif(not SOURCES, reason="RELAX_TEST_MINDSPEED names no checkout")
# torch_npu's graph compiler needs more of CANN than the stub has; MindSpeed only imports it here.
START = """
import json, sys
import torch, torch_npu
from unittest.mock import MagicMock
for name in ("torchair", "torchair.ge"):
    sys.modules[name] = MagicMock(__path__=[], __spec__=None)
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs a program that prints JSON in its last line, with MindSpeed as if it were installed."""
    metadata = tmp_path / "mindspeed-0.16.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((SOURCES, str(tmp_path)))}

    def started(program: str) -> object:
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return started


def test_it_is_loaded_repatched_and_corrected_without_apex(run) -> None:
    program = """
import importlib.util
assert importlib.util.find_spec("apex") is None
from relax_npu.upstream import mindspeed, mindspeed_use
from relax_npu.upstream.fix import _applied
sys.argv += ["--profile", "x"]
mindspeed.load({**mindspeed_use.ALWAYS, "context_parallel_size": 2}, initialised=False)
from mindspeed.args_utils import get_full_args
told = get_full_args()
print(json.dumps([sorted(_applied), hasattr(told, "profile"), told.context_parallel_size,
    mindspeed_use.features()]))
"""
    applied, profile, size, features = run(START + program)
    assert "mindspeed-late-default" in applied
    assert not profile, "it read our command line"
    assert size == 2
    assert {"megatron_basic", "context_parallel_size", "gated_delta_net", "use_flash_attn"} <= set(features)


def test_the_kernels_corrections_reach_the_real_autotuners(run) -> None:
    program = """
import importlib
from relax_npu.upstream.mindspeed_fixes import OF_KERNELS, _autotuned
told = {}
for fix in OF_KERNELS:
    fix.install()
    kernels = _autotuned(importlib.import_module(fix.module))
    told[fix.name] = [[len(kernel.configs), list(kernel.keys)] for kernel in kernels]
print(json.dumps(told))
"""
    told = run(START + program)
    assert [count for count, _ in told["mindspeed-l2norm-autotune"]] == [1, 1, 1, 1]
    keys = [key for _, names in told["mindspeed-delta-autotune-key"] for key in names]
    assert "BV" in keys
    assert not {"USE_G", "IS_VARLEN"} & set(keys)


def test_the_doctor_lists_its_features(run) -> None:
    program = """
import json
from relax_npu import probe
from relax_npu.upstream.mindspeed_use import ALWAYS
found = probe(timeout_s=400, mindspeed=ALWAYS)
print(json.dumps([found.state, found.mindspeed, found.mindspeed_error]))
"""
    state, features, error = run(program)
    assert (state, error) == ("ready", "")
    assert {"use_flash_attn", "megatron_basic"} <= set(features)

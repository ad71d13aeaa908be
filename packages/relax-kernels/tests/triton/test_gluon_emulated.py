"""The kernels for Hopper where there is no such device: as plain Python, against the torch backend."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_for_hopper_agree_with_the_reference() -> None:
    pytest.importorskip("triton.experimental.gluon")
    program = Path(__file__).with_name("emulated.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 17


def test_the_emulation_sees_a_barrier_armed_twice() -> None:
    path = Path(__file__).with_name("gluon_emulator.py")
    barrier = runpy.run_path(str(path))["Barrier"]()
    barrier.expect(4)
    with pytest.raises(AssertionError, match="armed before"):
        barrier.expect(4)
    barrier.deliver(4)
    barrier.wait(0)
    with pytest.raises(AssertionError, match="wait for ever"):
        barrier.wait(1)

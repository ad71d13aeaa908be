"""The triton kernels' arithmetic where there is no CUDA device: in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPERATORS = (
    "adamw_step",
    "adamw_steps",
    "gated_delta_rule",
    "causal_conv1d",
    "rms_norm",
    "gated_rms_norm",
    "swiglu",
    "output_gate",
    "rotary",
    "linear_logprob",
    "linear_logprob of a fixed head",
    "add_rms_norm",
    "delta_gates",
    "router_topk",
    "permute_tokens",
    "unpermute_tokens",
    "gated_delta_rule_step",
    "causal_conv1d_step",
)


def test_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{op} agrees" for op in OPERATORS]

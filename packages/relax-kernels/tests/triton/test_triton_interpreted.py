"""The triton kernels' arithmetic where there is no CUDA device: in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPERATORS = (
    "adamw_step",
    "adamw_steps",
    "adamw_steps of a scale on the device",
    "adamw_steps that are left out",
    "gated_delta_rule",
    "causal_conv1d",
    "rms_norm",
    "gated_rms_norm",
    "swiglu",
    "output_gate",
    "rotary",
    "linear_logprob",
    "linear_logprob of a fixed head",
    "linear_logprob of targets alone",
    "add_rms_norm",
    "delta_gates",
    "router_topk",
    "permute_tokens",
    "unpermute_tokens",
    "gated_delta_rule_step",
    "causal_conv1d_step",
)


def run(what: str) -> list[str]:
    """Run `interpreted.py`; return the lines it says."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program), what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_kernels_agree_with_the_reference() -> None:
    assert run("operators") == [f"{op} agrees" for op in OPERATORS]


def test_sequences_do_not_meet_and_closed_gates_keep_their_digits() -> None:
    lines = run("cases")
    assert len([line for line in lines if "-neighbours-" in line]) == 11
    assert len([line for line in lines if "-closes-now-and-then" in line]) == 3


def test_the_vocabulary_over_two_ranks() -> None:
    assert run("ranks") == ["top 900 agrees", "top 3 agrees", "fixed agrees"]

"""The smoke step that real NPUs will take, here with small sizes."""

import math
import subprocess
import sys

import pytest
from relax_npu import smoke

PROGRAM = """
import os
os.environ["RELAX_KERNELS_STRICT"] = "1"  # as main() sets it
from relax_npu.simulation import executed, install
install()
from relax_npu import smoke
sizes = dict(smoke.SHAPES, vocab_size=1000, hidden_size=32, intermediate_size=48, num_attention_heads=4)
sizes |= dict(num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
sizes |= dict(linear_key_head_dim=16, linear_value_head_dim=16)
smoke._LENGTHS = (70, 33, 1, 5)
values = smoke.step(1, sizes)
print("VALUES", values["loss"], values["grad_norm"], executed["npu.npu_chunk_fwd_o"])
"""


def test_it_runs_and_its_numbers_are_finite() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VALUES")]
    loss, norm, calls = map(float, line.split()[1:])
    # A model of random weights guesses: about log(1000), and its draft layer's share on top.
    assert math.log(1000) * 0.9 < loss < math.log(1000) * 1.5
    assert 0 < norm < math.inf
    assert calls > 0


@pytest.mark.parametrize(("dies", "tensor"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (16, 4)])
def test_dies_share_weights_as_far_as_the_heads_divide(dies: int, tensor: int) -> None:
    assert smoke.tensor_parallel(dies) == tensor


@pytest.mark.parametrize("dies", ["0", "-1", "two"])
def test_a_number_of_dies_that_makes_no_sense(dies: str) -> None:
    with pytest.raises(SystemExit):
        smoke.main(["--dies", dies])

"""The smoke step that real NPUs will take, here with small sizes."""

import math
import subprocess
import sys

PROGRAM = """
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

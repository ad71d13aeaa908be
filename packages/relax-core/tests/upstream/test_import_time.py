"""Importing megatron is quick and says nothing."""

import subprocess
import sys


def test_importing_megatron_loads_no_compiler():
    code = (
        "import sys, relax_core.upstream\n"
        "import megatron.core, megatron.core.optimizer\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "print('torch._dynamo' in sys.modules, hasattr(swiglu, '_torchdynamo_orig_callable'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False False"
    assert done.stderr == ""

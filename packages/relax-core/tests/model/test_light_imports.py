"""Reading config sections and sizes needs neither torch nor Megatron."""

import subprocess
import sys


def test_config_sections_load_without_torch():
    code = (
        "import sys; from relax_core.model import MtpConfig, Qwen35Config; import relax_core.model.settings\n"
        "print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import relax_kernels as rk
from relax_kernels import explanation
from relax_kernels.__main__ import main
from relax_kernels.ops import gates

README = Path(__file__).parents[1] / "README.md"


def test_the_table_names_every_operator_and_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "torch")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  torch: any device, priority 0" in lines
    for op in explanation.CALLS:
        (line,) = (line for line in lines if line.startswith(f"{op} "))
        assert "torch" in line
    (line,) = (line for line in lines if line.startswith("swiglu "))
    assert line.endswith("(environment: torch)")


def test_check_counts_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "torch", "--only", "swiglu-1.64-float32"]) == 0
    assert "torch on cpu: 1 passed, 0 failed, 0 not served" in capsys.readouterr().out


def test_check_fails_on_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rk, "swiglu", lambda x, backend: gates.swiglu(x, backend=backend) * 1.001)
    assert main(["check", "--backend", "torch", "--only", "swiglu-1.64-float32"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  swiglu-1.64-float32: y: off by" in out
    assert "torch on cpu: 0 passed, 1 failed, 0 not served" in out


def test_check_of_no_case_is_a_failure() -> None:
    assert main(["check", "--backend", "torch", "--only", "no such case"]) == 1


def test_check_refuses_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--backend", "typo"])
    assert "no backend 'typo' with a device here" in capsys.readouterr().err


def test_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_readme_lists_every_operator() -> None:
    text = README.read_text()
    assert [op for op in explanation.CALLS if f"`{op}`" not in text] == []


def test_importing_changes_nothing_global() -> None:
    code = "import torch; a = torch.get_num_threads(), torch.get_default_dtype(); import relax_kernels; "
    code += "assert a == (torch.get_num_threads(), torch.get_default_dtype()); import sys; "
    code += "assert not {'triton', 'transformers', 'relax_core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

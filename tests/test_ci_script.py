"""What .ci/run tells at its end, and its exit code, with nox replaced by one that prints and ends as told."""

import os
import subprocess
from pathlib import Path

import pytest

GREEN = """
============================= 124 passed in 6.21s ==============================
nox > Session tests(relax-npu) was successful in 8 seconds.
=========== 43 passed, 2 skipped, 1 xfailed, 5 warnings in 71.45s (0:01:11) ============
"""
RED = """
=========================== short test summary info ============================
= 4 failed, 843 passed, 1 skipped, 3212 warnings, 13 errors in 262.35s (0:04:22) =
========================= 1 error in 1.76s ==============================
nox > Session tests failed.
"""


@pytest.mark.parametrize(
    ("printed", "code", "closing"),
    [
        (GREEN, 0, "167 passed, 0 failed, 2 skipped"),
        (RED, 1, "843 passed, 18 failed, 1 skipped"),
        ("nox > Session lint failed.\n", 1, "0 passed, 0 failed, 0 skipped"),
        ("nox > Session lint was successful.\n", 0, "0 passed, 0 failed, 0 skipped"),
    ],
    ids=["green", "red", "lint fails", "no test ran"],
)
def test_the_closing_line_and_the_exit_code(
    root: Path, tmp_path: Path, printed: str, code: int, closing: str
) -> None:
    (tmp_path / "printed").write_text(printed)
    # Nothing is missing on this machine, so nothing is installed.
    for name in ("uv", "chromium", "cc", "git"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 99\n")
        (tmp_path / name).chmod(0o755)
    fake = tmp_path / "uvx"
    fake.write_text(f'#!/bin/sh\n[ "$1" = nox ] || exit 98\ncat "{tmp_path}/printed"\nexit {code}\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(root / ".ci/run")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.endswith(closing + "\n")

"""The blocks of the READMEs and guides that are marked as tested run as they stand.

A block is marked by the line `<!-- tested -->` before it, or `<!-- tested: slow -->` for the marker `slow`.
Python blocks run in this Python, bash blocks in bash up to the first error, both in an empty folder.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- tested(: slow)? -->\n+```(\w+)\n(.*?)\n```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]


def blocks() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            slow, language, source = match.groups()
            name = f"{page.relative_to(ROOT)}#{number}"
            found.append(pytest.param(language, source, id=name, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize(("language", "source"), blocks())
def test_a_block_runs(language: str, source: str, tmp_path: Path) -> None:
    runner = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}[language]
    # `uv run` finds the workspace from the empty folder; this environment's commands are on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"UV_PROJECT": str(ROOT), "UV_PYTHON": sys.prefix, "PATH": path}
    done = subprocess.run(
        [*runner, source], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_mark_stands_before_a_block() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == text.count("<!-- tested"), page

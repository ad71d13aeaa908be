"""The blocks of the READMEs and guides that are marked as tested run as they stand.

Every block of commands is marked as tested, or says what it needs: `<!-- needs: eight devices -->`.

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


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^ *(relax-[a-z]+|pip|uv|uvx|torchrun|nox|ray|docker) ", re.MULTILINE)
GUIDES = [ROOT / "README.md", ROOT / "packages/relax-core/README.md", *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_guide_is_tested_or_says_what_it_needs(page: Path) -> None:
    text = page.read_text()
    for block in FENCED.finditer(text):
        if block[1] != "bash" and not (block[1] == "" and COMMAND.search(block[2])):
            continue
        mark = text[: block.start()].rstrip().rsplit("\n", 1)[-1]
        assert re.fullmatch(r"<!-- (tested(: slow)?|needs: .+) -->", mark), block[0]
    beside = FENCED.sub("", text)
    commands = [line for line in beside.splitlines() if line.startswith("    ") and COMMAND.match(line)]
    assert not commands, "put commands into a block"

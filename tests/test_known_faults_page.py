"""The page of known faults names what there is: every fault that is put in, and tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from relax_core.testing.faults import FAULTS

PAGE = "docs/known-faults.md"


def page_section(root: Path, title: str) -> str:
    return (root / PAGE).read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_page_lists_the_faults_that_are_put_in(root: Path) -> None:
    _title, _line, *rows = re.findall(
        r"^\| (.+?) \| .+ \|$", page_section(root, "Put in and seen"), re.MULTILINE
    )
    assert rows == list(FAULTS)


def named_tests(root: Path) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/\-]+\.py)::(\w+)`", page_section(root, "Tests of their own"))


def test_the_tests_that_the_page_names_exist(root: Path) -> None:
    named = named_tests(root)
    assert len(named) > 5
    for path, name in named:
        tree = ast.parse((root / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, name)


@pytest.mark.parametrize("finding", range(1, 12))
def test_each_finding_of_the_report_is_named(root: Path, finding: int) -> None:
    assert re.search(rf"finding {finding}\b", page_section(root, "Put in and seen"))

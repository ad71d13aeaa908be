"""The guide of the NPU is current, and its translation keeps step."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from relax_npu.operators.table import BY_TORCH, CAPABILITIES


@pytest.fixture(scope="module")
def page(script) -> ModuleType:
    return script("npu_page")


def test_the_generated_tables_are_current(page: ModuleType) -> None:
    for path in page.PAGES:
        text = path.read_text()
        assert len(page.BLOCK.findall(text)) == len(page.blocks())
        assert text == page.filled(text), "run `nox -s docs`"


def structure(path: Path) -> list[str]:
    """Levels of headings, and of each table row the number of its cells, in order."""
    told = []
    for line in path.read_text().splitlines():
        if heading := re.match(r"#+ ", line):
            told.append(heading.group())
        elif line.startswith("|"):
            told.append(str(line.count("|")))
        elif re.match(r"\d+\. ", line):
            told.append("step")
    return told


def test_the_translation_has_the_same_headings_tables_and_steps(page: ModuleType) -> None:
    english, chinese = page.PAGES
    assert structure(english) == structure(chinese)


def test_commands_stand_in_both(page: ModuleType) -> None:
    english, chinese = (
        set(re.findall(r"`((?:relax-npu|nox|relax-train) [^`]+)`", p.read_text())) for p in page.PAGES
    )
    assert english == chinese


def test_every_operator_of_relax_kernels_is_in_the_table() -> None:
    from relax_kernels.explanation import CALLS

    assert set(CALLS) == {c.operator for c in CAPABILITIES} | set(BY_TORCH)

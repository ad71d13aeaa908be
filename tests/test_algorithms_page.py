"""The page of algorithms is the registry's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_page_of_algorithms_is_current(script: Callable[[str], Any]) -> None:
    page = script("algorithms_page")
    assert page.PAGE.read_text() == page.page(), "run `nox -s docs`"


def test_the_guide_adds_an_algorithm_in_thirty_lines(root: Path) -> None:
    """tests/test_readme_commands.py trains with it."""
    (source,) = re.findall(
        r"<<'END'\n(.*?)\nEND\n", (root / "docs/adding-an-algorithm.md").read_text(), re.DOTALL
    )
    assert len(source.splitlines()) <= 30

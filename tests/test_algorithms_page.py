"""The page of algorithms is the registry's."""

from collections.abc import Callable
from typing import Any


def test_the_page_of_algorithms_is_current(script: Callable[[str], Any]) -> None:
    page = script("algorithms_page")
    assert page.PAGE.read_text() == page.page(), "run `nox -s docs`"

"""The page of weight maps is the tables'."""

from collections.abc import Callable
from typing import Any


def test_the_page_of_weight_maps_is_current(script: Callable[[str], Any]) -> None:
    page = script("weight_map")
    assert page.PAGE.read_text() == page.page(), "run `nox -s docs`"

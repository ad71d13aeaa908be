"""The pages of recipes, plan and rules are those of the package."""

from collections.abc import Callable
from typing import Any


def test_the_pages_of_recipes_plan_and_rules_are_current(script: Callable[[str], Any]) -> None:
    pages = script("recipes")
    assert pages.RECIPES.read_text() == pages.recipes_page(), "run `nox -s docs`"
    assert pages.PLAN.read_text() == pages.plan_page(), "run `nox -s docs`"
    assert pages.RULES.read_text() == pages.rules_page(), "run `nox -s docs`"


def test_every_recipe_is_listed_with_its_status(script: Callable[[str], Any]) -> None:
    page = script("recipes").RECIPES.read_text()
    for name in ("qwen35-9b-mtp-8xnpu-thd", "qwen35-9b-cp-16xnpu", "qwen35-35b-a3b-sft-mtp-8xnpu"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.split("|")[-2].strip() in ("run", "planned", "waits")

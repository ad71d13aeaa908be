"""`relax-npu env --recipe` with the recipes that relax-core has."""

import pytest
from relax_core.recipes import builtin_recipes
from relax_npu.recipe import RecipeError, shares_dies


def test_every_recipe_for_the_npu_says_whether_its_dies_are_shared() -> None:
    shared = {name: shares_dies(name) for name in builtin_recipes() if "npu" in name}
    assert shared["qwen35-9b-mtp-4xnpu"]
    assert not shared["qwen35-35b-a3b-sft-mtp-8xnpu"], "nothing samples"
    assert len(shared) >= 10


def test_a_recipe_for_another_device_or_with_a_mistake(tmp_path) -> None:
    with pytest.raises(RecipeError, match="is for cuda"):
        shares_dies("qwen35-9b-mtp-8xcuda")
    with pytest.raises(RecipeError, match="qwen35-9b-mtp-4xnp"):
        shares_dies("qwen35-9b-mtp-4xnp")

"""Recipes: YAML files of settings that ship with the package, and how they and the user's own are read.

A recipe holds sections of `RelaxConfig`, and may hold `extends: NAME|PATH` (the recipe it starts from; a path
is relative to the file) and `description` (one line for `relax-train --list-recipes`).
"""

from relax_core.recipes.builtin import builtin_recipes
from relax_core.recipes.read import describe_recipe, read_recipe

__all__ = ["builtin_recipes", "describe_recipe", "read_recipe"]

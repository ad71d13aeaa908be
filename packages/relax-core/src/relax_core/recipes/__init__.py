"""Recipes: YAML files of settings that ship with the package, and how they and the user's own are read.

A recipe holds sections of `RelaxConfig`, and may hold `extends: NAME|PATH` (the recipe it starts from; a path
is relative to the file), `description` (one line for `relax-train --list-recipes`) and `status` (a key of
`STATUS`).
"""

from relax_core.recipes.builtin import builtin_recipes
from relax_core.recipes.read import STATUS, describe_recipe, read_recipe, recipe_status

__all__ = ["STATUS", "builtin_recipes", "describe_recipe", "read_recipe", "recipe_status"]

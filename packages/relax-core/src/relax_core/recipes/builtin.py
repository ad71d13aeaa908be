"""The recipes that ship with the package."""

from pathlib import Path

_HERE = Path(__file__).parent


def builtin_recipes() -> dict[str, Path]:
    """The file of every recipe by its name, in alphabetical order."""
    return {file.stem: file for file in sorted(_HERE.glob("*.yaml"))}

"""What ships with the package: the recipes' names, and files they refer to."""

from pathlib import Path

_HERE = Path(__file__).parent
PREFIX = "builtin:"


def builtin_recipes() -> dict[str, Path]:
    """The file of every recipe by its name, in alphabetical order."""
    return {file.stem: file for file in sorted(_HERE.glob("*.yaml"))}


def locate(path: str | Path) -> Path:
    """The file or folder that a setting names.

    `builtin:quickstart/model` is a file of this package, so that recipes and resolved configs are the same
    on every machine; everything else is a path of the user's.

    Raises:
        ValueError: nothing of that name ships with the package.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(text).expanduser()
    inner = text.removeprefix(PREFIX)
    found = _HERE / inner
    if not inner or ".." in Path(inner).parts or not found.exists():
        known = sorted(
            f"{PREFIX}{entry.relative_to(_HERE)}"
            for folder in _HERE.iterdir()
            if folder.is_dir() and not folder.name.startswith("_")
            for entry in folder.iterdir()
        )
        raise ValueError(f"{text} does not ship with relax-core; there is: {', '.join(known) or 'nothing'}")
    return found

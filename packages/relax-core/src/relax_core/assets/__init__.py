"""What ships with relax-core: the quickstart's checkpoint and task, named `builtin:NAME` in settings."""

from pathlib import Path

BUILTIN = "builtin:"

_FOLDER = Path(__file__).parent


def locate(path: str) -> Path:
    """The place that a setting names: a path of the user's own, or `builtin:NAME` for a shipped one.

    Raises:
        ValueError: nothing of that name ships with the package.
    """
    if not path.startswith(BUILTIN):
        return Path(path).expanduser()
    place = (_FOLDER / path.removeprefix(BUILTIN)).resolve()
    if _FOLDER not in place.parents or not place.exists():
        shipped = sorted(
            f"{BUILTIN}{p.parent.name}/{p.name}" for p in _FOLDER.glob("*/*") if p.name[0] not in "._"
        )
        raise ValueError(f"{path} does not ship with relax-core; these do: {', '.join(shipped)}")
    return place

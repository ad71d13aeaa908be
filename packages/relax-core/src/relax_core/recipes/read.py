"""Reads a recipe and those it extends into one layer of settings."""

from pathlib import Path

from relax_core.config.layer import Layer
from relax_core.config.problems import Problem, nearest
from relax_core.config.yaml_text import YamlError, parse_yaml, show
from relax_core.recipes.builtin import builtin_recipes

STATUS = {
    "run": "has run as it is, on the hardware that it names",
    "planned": "is planned on that hardware and has not run there; its layout is proven on CPU ranks",
    "waits": "is planned; a part of Relax that it needs is not there yet, and a start says which",
}
"""How far a recipe has been taken."""


def read_recipe(spec: str) -> Layer:
    """Reads a recipe, the base of its `extends` first.

    Args:
        spec: name of a built-in recipe, or path of a YAML file (with a slash or a suffix).

    Returns:
        The merged settings with the file and line of each. A recipe that cannot be found or read is a
        problem of the layer, so that it is reported with all others.
    """
    return _read(spec, relative_to=Path(), origin="--recipe", chain=())


def describe_recipe(file: Path) -> str:
    """The `description` of a recipe, or nothing.

    Raises:
        YamlError: the file is no YAML mapping.
    """
    return str(parse_yaml(file.read_text(encoding="utf-8"))[0].get("description", ""))


def recipe_status(file: Path) -> str:
    """How far a recipe that ships has been taken: a key of `STATUS`, "planned" where it says nothing.

    Raises:
        YamlError: the file is no YAML mapping.
    """
    return str(parse_yaml(file.read_text(encoding="utf-8"))[0].get("status", "planned"))


def _read(spec: str, *, relative_to: Path, origin: str, chain: tuple[Path, ...]) -> Layer:
    file, problem = _find(spec, relative_to, origin)
    if file is None:
        return Layer(problems=[problem] if problem else [])
    if file.resolve() in chain:
        loop = " -> ".join(part.name for part in (*chain, file))
        return Layer(problems=[Problem((), f"the recipe extends itself: {loop}", given=spec, origin=origin)])
    try:
        values, lines = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Layer(problems=[Problem((), f"the recipe cannot be read: {reason}", given=str(file))])
    origins = {path: f"{file.name}, line {line}" for path, line in lines.items()}
    base, problems = values.pop("extends", None), []
    description = values.pop("description", None)
    status = values.pop("status", None)
    if status is not None and status not in STATUS:
        given, at = show(status), origins["status",]
        problems.append(Problem(("status",), "not allowed", given, at, f"one of {', '.join(STATUS)}"))
    if description is not None and not isinstance(description, str):
        problems.append(Problem(("description",), "must be text", show(description), origins["description",]))
    if base is not None and not isinstance(base, str):
        problems.append(
            Problem(("extends",), "must be one recipe's name or path", show(base), origins["extends",])
        )
        base = None
    own = Layer(values, origins, problems)
    if base is None:
        return own
    below = _read(base, relative_to=file.parent, origin=origins["extends",], chain=(*chain, file.resolve()))
    return own.over(below)


def _find(spec: str, relative_to: Path, origin: str) -> tuple[Path | None, Problem | None]:
    known = builtin_recipes()
    if spec in known:
        return known[spec], None
    if "/" in spec or spec.endswith((".yaml", ".yml")):
        file = relative_to / Path(spec).expanduser()
        if file.is_file():
            return file, None
        return None, Problem((), "there is no such recipe file", given=spec, origin=origin)
    return None, Problem(
        (),
        "there is no recipe of that name",
        given=spec,
        origin=origin,
        allowed=f"{', '.join(known)}, or the path of a YAML file",
        nearest=nearest(spec, known),
    )

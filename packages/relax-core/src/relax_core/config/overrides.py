"""Dotted flags, `--section.field value`, as a layer of settings over a recipe."""

from collections.abc import Sequence

from pydantic import BaseModel

from relax_core.config.fields import FieldRow, field_rows, rows_by_path
from relax_core.config.layer import Layer
from relax_core.config.problems import Problem, nearest
from relax_core.config.yaml_text import Path, YamlError, parse_scalar


def parse_overrides(model: type[BaseModel], arguments: Sequence[str]) -> Layer:
    """Reads flags that name fields of `model`.

    `--a.b value`, `--a.b=value` and, for a switch, `--a.b` alone are understood. Values are read as in a
    recipe, except that text stays as it was typed. Whatever is no flag of a field becomes a problem.

    Args:
        model: the root config.
        arguments: what is left of the command line.

    Returns:
        The settings, where each came from, and the problems.
    """
    layer = Layer()
    rows = rows_by_path(model)
    names = [row.name for row in field_rows(model)]
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            layer.problems.append(
                Problem((), "a value without a flag", given=token, allowed="--section.field value")
            )
            continue
        name, equals, text = token[2:].partition("=")
        value: str | None = text if equals else None
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        path = tuple(name.split("."))
        row = rows.get(path) or _keyed_parent(rows, path)
        flag = f"--{name}"
        if row is None:
            near = nearest(name, names)
            layer.problems.append(
                Problem(
                    (),
                    "unknown flag" if near else "unknown flag; `relax-train --help` lists all",
                    given=flag,
                    origin="command line",
                    nearest=f"--{near}" if near else None,
                )
            )
        elif path in layer.origins:
            layer.problems.append(Problem(path, "the flag is given twice", given=value, origin=flag))
        elif value is None and row.kind != "true|false":
            layer.problems.append(Problem(path, "the flag needs a value", origin=flag, allowed=row.allowed))
        else:
            _put(layer, row, path, value, flag)
    return layer


def _keyed_parent(rows: dict[Path, FieldRow], path: Path) -> FieldRow | None:
    row = rows.get(path[:-1])
    return row if row is not None and row.keyed else None


def _put(layer: Layer, row: FieldRow, path: Path, value: str | None, flag: str) -> None:
    if value is None:
        layer.put(path, True, flag)
        return
    null = row.nullable and value in ("null", "~")
    literal = (row.text or path != row.path) and not null
    try:
        layer.put(path, value if literal else parse_scalar(value), flag)
    except YamlError as error:
        layer.problems.append(
            Problem(path, f"cannot be read: {error}", given=value, origin=flag, allowed=row.allowed)
        )

"""From layers of settings to one validated config, or to every problem at once."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from relax_core.config.checks import cross_problems
from relax_core.config.fields import rows_by_path, section_at, subsections
from relax_core.config.layer import Layer
from relax_core.config.overrides import parse_overrides
from relax_core.config.problems import ConfigError, Problem, nearest
from relax_core.config.root import RelaxConfig
from relax_core.config.section import SettingError, SettingErrors
from relax_core.config.yaml_text import Path, show
from relax_core.recipes import read_recipe

Config = TypeVar("Config", bound=BaseModel)


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RelaxConfig:
    """The config of a recipe with dotted flags over it.

    Args:
        recipe: name of a built-in recipe, or path of a YAML file.
        overrides: flags such as `["--run.steps", "20"]`.

    Raises:
        ConfigError: with every problem of recipe and flags together.
    """
    return resolve(RelaxConfig, [read_recipe(recipe), parse_overrides(RelaxConfig, overrides)])


def resolve(model: type[Config], layers: Iterable[Layer]) -> Config:
    """Merges layers, the later over the earlier, and validates the result.

    Sections and free mappings merge key by key; every other value replaces the one before. Values are
    validated strictly: `"3"` is no integer, `1` is no boolean.

    Raises:
        ConfigError: with the problems of all layers and of validation.
    """
    layer = Layer()
    for above in layers:
        layer = above.over(layer)
    values = _with_all_sections(model, layer.values)
    problems = [*layer.problems, *_texts_that_are_none(layer.values, layer.origins)]
    if len(problems) > len(layer.problems):
        raise ConfigError(problems)
    try:
        config = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = [
            problem
            for detail in error.errors(include_url=False)
            for problem in _problems(model, detail, values, layer.origins)
        ]
        problems += list({problem.path: problem for problem in reversed(found) if problem.path}.values())[
            ::-1
        ]
        problems += cross_problems(_valid_sections(model, values))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _with_all_sections(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    filled = dict(values)
    for name, section in subsections(model).items():
        given = {} if filled.get(name) is None else filled[name]
        filled[name] = _with_all_sections(section, given) if isinstance(given, dict) else given
    return filled


def _texts_that_are_none(
    values: Mapping[str, Any], origins: Mapping[Path, str], at: Path = ()
) -> Iterator[Problem]:
    for name, value in values.items():
        path = (*at, name)
        if isinstance(value, Mapping):
            yield from _texts_that_are_none(value, origins, path)
        elif isinstance(value, str) and not _is_text(value):
            message = "is no text: it holds a NUL character, or bytes that are no UTF-8"
            yield Problem(path, message, ascii(value), origins.get(path))


def _is_text(value: str) -> bool:
    """Whether a file, a path and JSON can hold it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _valid_sections(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, BaseModel]:
    valid = {}
    for name, section in subsections(model).items():
        try:
            valid[name] = section.model_validate_json(json.dumps(values.get(name, {})), strict=True)
        except ValidationError:
            continue
    return valid


def _problems(
    model: type[BaseModel], detail: ErrorDetails, values: Mapping[str, Any], origins: Mapping[Path, str]
) -> Iterator[Problem]:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, SettingErrors):
        errors = error.errors
    elif isinstance(error, SettingError):
        errors = [error]
    else:
        yield _problem(model, detail, values, origins)
        return
    section = _real_path(model, tuple(str(part) for part in detail["loc"]))
    for one in errors:
        path = (*section, one.field)
        given, near = show(one.given), show(one.nearest)
        yield Problem(path, str(one), given, origins.get(path), one.allowed, near)


def _problem(
    model: type[BaseModel], detail: ErrorDetails, values: Mapping[str, Any], origins: Mapping[Path, str]
) -> Problem:
    path = _real_path(model, tuple(str(part) for part in detail["loc"]))
    row = rows_by_path(model).get(path)
    origin = next((origins[path[:i]] for i in range(len(path), 0, -1) if path[:i] in origins), None)
    given = _given(values, path)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return _unknown(model, path, given, origin)
    if detail["type"] == "missing":
        return Problem(path, "must be set", allowed=row.allowed if row else None)
    if detail["type"] in ("value_error", "assertion_error"):
        return Problem(path, message, given if row else None, origin if row else None)
    if section_at(model, path) is not None:
        return Problem(path, "a section holds settings, such as `name: value`", given, origin)
    if row is None:
        return Problem(path, message, given, origin)
    near = nearest(str(given).strip('"'), row.choices) if row.choices else _bound(detail)
    message = "must be finite" if detail["type"] == "finite_number" else "not allowed"
    return Problem(path, message, given, origin, row.allowed, near)


def _bound(detail: ErrorDetails) -> str | None:
    """The end of the range that a number lies beyond."""
    limits = detail.get("ctx", {})
    for name, inward in (("ge", 0), ("le", 0), ("gt", 1), ("lt", -1)):
        limit = limits.get(name)
        # Next to an end that does not belong to the range itself there is a number only among integers.
        if limit is not None and (not inward or isinstance(limit, int)):
            return show(limit + inward)
    return None


def _unknown(model: type[BaseModel], path: Path, given: str | None, origin: str | None) -> Problem:
    parent = section_at(model, path[:-1]) or model
    is_section = len(path) == 1
    near = nearest(".".join(path), [".".join((*path[:-1], name)) for name in parent.model_fields])
    if near is None:
        near = nearest(".".join(path), [".".join(known) for known in rows_by_path(model)])
    return Problem(
        path,
        "unknown section" if is_section else "unknown setting",
        None if is_section else given,
        origin,
        allowed=", ".join(parent.model_fields),
        nearest=near,
    )


def _real_path(model: type[BaseModel], location: Path) -> Path:
    """Cuts pydantic's location after the field: what follows names members of unions and containers."""
    for length in range(1, len(location)):
        if location[:length] in rows_by_path(model):
            return location[:length]
    return location


def _given(values: Mapping[str, Any], path: Path) -> str | None:
    value: Any = values
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    text = show(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""Every field of a config as one flat row: what `--help` prints and what a refusal says is allowed."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from relax_core.config.yaml_text import Path, show


@dataclass(frozen=True)
class FieldRow:
    """One setting.

    Attributes:
        path: section names and the field's own name.
        kind: the word that stands for its value in `--help`, such as `NUMBER` or `cpu|cuda`.
        allowed: the values it takes, in words.
        text: whether a flag's value is taken literally (text and paths).
        nullable: whether `null` is one of its values.
        choices: the values of a closed choice, else empty.
        keyed: whether it is a mapping with keys of the user's own.
        required: whether the user must set it.
        default: its value otherwise.
        doc: its meaning and unit.
    """

    path: Path
    kind: str
    allowed: str
    text: bool
    nullable: bool
    choices: tuple[str, ...]
    keyed: bool
    required: bool
    default: Any
    doc: str

    @property
    def name(self) -> str:
        """The dotted name, as in `--rollout.top_p`."""
        return ".".join(self.path)


def subsections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of `model` that are sections themselves."""
    return {
        name: info.annotation
        for name, info in model.model_fields.items()
        if inspect.isclass(info.annotation) and issubclass(info.annotation, BaseModel)
    }


def section_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The section that `path` names inside `model`, or None where it names none."""
    for name in path:
        inner = subsections(model).get(name)
        if inner is None:
            return None
        model = inner
    return model


@lru_cache
def field_rows(model: type[BaseModel]) -> tuple[FieldRow, ...]:
    """All settings of a config and its sections, in the order of declaration."""
    return tuple(_walk(model, ()))


@lru_cache
def rows_by_path(model: type[BaseModel]) -> dict[Path, FieldRow]:
    """`field_rows` by path."""
    return {row.path: row for row in field_rows(model)}


def _walk(model: type[BaseModel], at: Path) -> Iterator[FieldRow]:
    inner = subsections(model)
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    for name, info in model.model_fields.items():
        path = (*at, name)
        if name in inner:
            yield from _walk(inner[name], path)
            continue
        options = _options(schema["properties"][name], definitions)
        typed = [option for option in options if option.get("type") != "null"]
        nullable = len(typed) < len(options)
        choices = tuple(str(value) for option in typed for value in option.get("enum", ()))
        yield FieldRow(
            path=path,
            kind="|".join(dict.fromkeys(_kind(option) for option in typed)) or "VALUE",
            allowed=" or ".join([*dict.fromkeys(_allowed(option) for option in typed), *["null"] * nullable]),
            text=any(option.get("type") == "string" for option in typed),
            nullable=nullable,
            choices=choices,
            keyed=any(option.get("type") == "object" for option in typed),
            required=info.is_required(),
            default=None if info.is_required() else info.get_default(call_default_factory=True),
            doc=info.description or "",
        )


def _options(schema: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in schema:
        return _options(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "const" in schema:
        return [{**schema, "enum": [schema["const"]]}]
    if "anyOf" in schema:
        return [option for part in schema["anyOf"] for option in _options(part, definitions)]
    if "allOf" in schema and len(schema["allOf"]) == 1:
        return _options(schema["allOf"][0], definitions)
    return [schema]


def _kind(option: dict[str, Any]) -> str:
    if "enum" in option:
        return "|".join(show(value) for value in option["enum"])
    names = {
        "boolean": "true|false",
        "integer": "INTEGER",
        "number": "NUMBER",
        "array": "LIST",
        "object": "MAPPING",
    }
    if option.get("format") in ("path", "file-path", "directory-path"):
        return "PATH"
    return names.get(option.get("type", ""), "TEXT")


def _allowed(option: dict[str, Any]) -> str:
    if "enum" in option:
        values = [show(value) for value in option["enum"]]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    kind = option.get("type")
    if kind == "boolean":
        return "true or false"
    if kind in ("integer", "number"):
        bounds = [
            f"{words} {show(option[key])}"
            for key, words in (
                ("minimum", "at least"),
                ("exclusiveMinimum", "above"),
                ("maximum", "at most"),
                ("exclusiveMaximum", "below"),
                ("multipleOf", "a multiple of"),
            )
            if key in option
        ]
        noun = "an integer" if kind == "integer" else "a number"
        return f"{noun}, {' and '.join(bounds)}" if bounds else noun
    if kind == "array":
        inner = option.get("items") or option.get("prefixItems") or {}
        inner = inner[0] if isinstance(inner, list) else inner
        return f"a list, each {_allowed(inner)}" if inner else "a list"
    if kind == "object":
        return "a mapping such as {name: value}"
    if "pattern" in option:
        return f"text of the form {option['pattern']}"
    return "text that is not empty" if option.get("minLength") else "text"

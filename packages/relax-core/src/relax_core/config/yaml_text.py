"""YAML in and out: plain YAML 1.2 scalars, duplicate keys refused, the line of every value known."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from pydantic import BaseModel

Path = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2: `1e-6` is a number, `on`, `no` and dates are text."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back."""


_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+(?:_[0-9]+)*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(
            _tag, re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
        )


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


class YamlError(ValueError):
    """A text that is no YAML mapping; the message names the line."""


def parse_yaml(text: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Parses a mapping.

    Args:
        text: a YAML document.

    Returns:
        The mapping, and the line (from 1) of every key by its path.

    Raises:
        YamlError: the text is no YAML, its top is no mapping, or a key occurs twice.
    """
    with _root_of(text) as (loader, node):
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise YamlError("the top of the file must be a mapping of sections, such as `run:`")
        lines: dict[Path, int] = {}
        _index(loader, node, (), lines)
        return loader.construct_document(node), lines


def parse_scalar(text: str) -> Any:
    """The value that `text` has in a recipe: `1e-6` a number, `true` a boolean, `[1, 2]` a list.

    Raises:
        YamlError: the text is no YAML.
    """
    with _root_of(text) as (loader, node):
        return None if node is None else loader.construct_document(node)


@contextmanager
def _root_of(text: str) -> Iterator[tuple[_Loader, yaml.Node | None]]:
    """The loader and the top node of a document; errors of PyYAML inside the block become `YamlError`."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _refuse_cycles(node)
            yield loader, node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise YamlError("nested too deeply to read") from error


def _refuse_cycles(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> None:
    if any(node is outer for outer in above):
        raise YamlError(f"line {node.start_mark.line + 1}: the value contains itself")
    inside = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else ()
    for child in inside:
        for part in child if isinstance(child, tuple) else (child,):
            _refuse_cycles(part, (*above, node))


def _index(loader: _Loader, node: yaml.MappingNode, at: Path, lines: dict[Path, int]) -> None:
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise YamlError(f"line {line}: the key {key!r} must be text")
        path = (*at, key)
        if path in lines:
            raise YamlError(f"line {line}: {'.'.join(path)} is set twice, first in line {lines[path]}")
        lines[path] = line
        if isinstance(value_node, yaml.MappingNode):
            _index(loader, value_node, path, lines)


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(
        value, ".nan" if value != value else repr(value)
    )
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML folds exotic line breaks such as U+0085 into blanks unless they are escaped.
    style = None if value.replace("\n", "").isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(float, _number)
_Dumper.add_representer(str, _text)


def dump_yaml(data: dict[str, Any]) -> str:
    """Writes a mapping as YAML in its own order; `parse_yaml` gives it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_config(config: BaseModel) -> str:
    """Writes every field of a config as YAML, in the order of declaration."""
    return dump_yaml(config.model_dump(mode="json"))


def show(value: Any) -> str:
    """A value as a user would write it in a recipe, on one line."""
    if isinstance(value, str):
        if value and not _needs_quotes(value):
            return value
        return yaml.dump(value, Dumper=_Dumper, default_style='"', allow_unicode=True, width=10**6).strip()
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, dict | list):
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
        return text.strip()
    return dump_yaml({"v": value}).removeprefix("v: ").strip()


def _needs_quotes(text: str) -> bool:
    """Whether plain `text` in a recipe would not be read back as this very text."""
    try:
        return bool(parse_scalar(text) != text)
    except YamlError:
        return True

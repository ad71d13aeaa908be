"""The text of `relax-train --help`: the options, then every setting with its meaning, unit and default."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relax_core.config.fields import FieldRow, field_rows, section_at
from relax_core.config.root import RelaxConfig
from relax_core.config.yaml_text import show

_INTRODUCTION = """\
relax-train: trains a Qwen3.5-class model by reinforcement learning or supervised fine-tuning

  relax-train                                   the recipe quickstart, on two CPU cores
  relax-train --recipe NAME|PATH [--section.field VALUE ...]
  relax-train --resume RUN_DIR

Options
  --recipe NAME|PATH   settings to start from: a recipe of --list-recipes, or a YAML file of your own
  --resume RUN_DIR     goes on with an interrupted run, from its last checkpoint
  --dry-run            prints the resolved settings as YAML and stops
  --plan               shows memory and time of the run, or why it cannot work; needs no device and no weights
  --json               with --plan: as JSON
  --plan-device NAME   with --plan: what it runs on (h200, h100, a100, 910c-die)
  --plan-page FILE     with --plan: a picture of it, as an HTML page
  --list-recipes       lists the recipes that ship with Relax
  --doctor             shows versions, devices and the corrections of upstream packages
  --version            shows the version
  -h, --help           shows this text; with --recipe, also what that recipe sets

Settings, as dotted flags or as sections of a YAML file; [..] is the unit. Keys and tokens (WANDB_API_KEY,
HF_TOKEN, ...) are taken from the environment only.
"""


def help_text(
    *, width: int, bold: bool, recipe: str | None = None, values: Mapping[str, Any] | None = None
) -> str:
    """Writes the whole text.

    Args:
        width: columns of the terminal.
        bold: whether names are set in bold by terminal codes.
        recipe: name of a recipe whose settings are shown beside the defaults.
        values: that recipe's settings, nested by section.
    """
    lines = [_INTRODUCTION]
    for section, rows in _by_section(field_rows(RelaxConfig)):
        described = section_at(RelaxConfig, (section,))
        doc = (described.__doc__ or "").strip().splitlines()[0] if described else ""
        lines.append(f"\n{_strong(section, bold)}: {doc}")
        for row in rows:
            lines += _field(row, width, bold, recipe, values or {})
    return "\n".join(lines)


def _by_section(rows: Iterable[FieldRow]) -> Iterator[tuple[str, list[FieldRow]]]:
    groups: dict[str, list[FieldRow]] = {}
    for row in rows:
        groups.setdefault(row.path[0], []).append(row)
    yield from groups.items()


def _field(
    row: FieldRow, width: int, bold: bool, recipe: str | None, values: Mapping[str, Any]
) -> Iterator[str]:
    default = "required" if row.required else f"default {show(_plain(row.default))}"
    set_to = _at(values, row.path)
    if recipe is not None and set_to is not None:
        default += f", {recipe} sets {show(set_to)}"
    allowed = row.allowed.removesuffix(" or null") if row.kind != "true|false" and not row.choices else ""
    bounded = f" {allowed[0].upper()}{allowed[1:]}." if ", " in allowed else ""
    yield f"  {_strong(f'--{row.name}', bold)} {row.kind}   ({default})"
    yield from textwrap.wrap(
        row.doc + bounded,
        width=max(40, width - 1),
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _at(values: Mapping[str, Any], path: Iterable[str]) -> Any:
    found: Any = values
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _strong(text: str, bold: bool) -> str:
    return f"\033[1m{text}\033[0m" if bold else text

"""The base of every config section, and how a field states its meaning, unit and default."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class SettingError(ValueError):
    """A setting contradicts others of its own section.

    Args:
        field: its name.
        message: what is wrong.
        given: its value.
        allowed: the limit, in words.
        nearest: the nearest value that works; None is null.
    """

    def __init__(self, field: str, message: str, *, given: Any, allowed: str, nearest: Any) -> None:
        super().__init__(message)
        self.field, self.given, self.allowed, self.nearest = field, given, allowed, nearest


class SettingErrors(ValueError):
    """Several of them."""

    def __init__(self, errors: Sequence[SettingError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


def refuse(errors: Sequence[SettingError]) -> None:
    """Raises what is wrong, if anything is.

    Raises:
        SettingErrors: something is.
    """
    if errors:
        raise SettingErrors(errors)


class Section(BaseModel):
    """A frozen group of settings that lives in the file of the component it configures.

    Unknown keys, inf and NaN are refused and every field carries a description (see `setting`). Recipes and
    flags are validated strictly on top of that (`relax_core.config.load`): there `"3"` is no integer.
    The file of a section must be importable without torch, so that `relax-train --help` is quick.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def setting(default: Any, doc: str, *, unit: str | None = None, **constraints: Any) -> Any:
    """Declares one field of a `Section`.

    Args:
        default: the value when the user sets none; `...` makes the field required.
        doc: one sentence for `relax-train --help`.
        unit: what a number counts ("tokens", "seconds", "GiB"); shown behind the doc.
        **constraints: pydantic constraints, for instance `ge=0` or `le=1`.
    """
    text = f"{doc} [{unit}]" if unit else doc
    return Field(default, description=text, json_schema_extra={"unit": unit} if unit else None, **constraints)

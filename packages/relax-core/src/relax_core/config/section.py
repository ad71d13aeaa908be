"""The base of every config section, and how a field states its meaning, unit and default."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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

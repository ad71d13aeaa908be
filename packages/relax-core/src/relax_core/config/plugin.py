"""Names that come from entry points, as a field type: an unknown name is refused with those installed."""

from importlib.metadata import entry_points
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class PluginName:
    """Annotates a text field: `Annotated[str, PluginName("relax_core.devices", "auto", "cpu")]`.

    Nothing is imported: the names are read from the metadata of the installed distributions.
    """

    def __init__(self, group: str, *built_in: str) -> None:
        self.group = group
        self.built_in = built_in

    def names(self) -> tuple[str, ...]:
        """The built-in names, then those of installed entry points."""
        return tuple(dict.fromkeys((*self.built_in, *sorted(entry_points(group=self.group).names))))

    def _check(self, name: str) -> str:
        if name not in self.names():
            raise PydanticCustomError(
                "plugin_name",
                "{name} is not installed in the entry-point group {group}; there is: {known}",
                {"name": name, "group": self.group, "known": ", ".join(self.names())},
            )
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {**handler(schema), "enum": list(self.names())}

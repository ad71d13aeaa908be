"""Settings of completions of several turns."""

from typing import Self

from pydantic import model_validator

from relax_core.config.section import Section, SettingError, setting


class EnvironmentConfig(Section):
    """What answers the model's turns."""

    name: str | None = setting(
        None,
        "tools, or a factory of your own as module:function; null ends a completion with the model's first "
        "turn.",
        min_length=1,
    )
    tools: tuple[str, ...] = setting(
        (), "Functions, as module:function, that the model may call; their signatures describe them to it."
    )
    max_turns: int = setting(8, "Turns of the model in one completion.", unit="turns", ge=1)
    turn_tokens: int | None = setting(
        None,
        "Length at which one turn of the model is cut; null leaves it to rollout.max_new_tokens, which all "
        "turns of a completion share.",
        unit="tokens",
        ge=1,
    )
    reply_tokens: int = setting(512, "Length at which the content of one reply is cut.", unit="tokens", ge=1)
    timeout_s: float = setting(
        10.0, "Time after which a tool call, or a reply, counts as failed.", unit="seconds", gt=0, le=1e6
    )
    concurrency: int = setting(4, "Tool calls at the same time.", unit="calls", ge=1)

    @model_validator(mode="after")
    def _tools_are_called(self) -> Self:
        if (self.name == "tools") != bool(self.tools):
            raise SettingError(
                "tools" if self.tools else "name",
                f"name is {self.name!r} and tools are {list(self.tools)}: the environment tools needs tools, "
                "and no other calls them; set both or neither",
                given=self.tools or self.name,
                allowed="[], or name tools" if self.tools else "null or module:function, or tools",
                nearest=() if self.tools else None,
            )
        if self.name is None:
            unused = [
                field
                for field, info in type(self).model_fields.items()
                if getattr(self, field) != info.default
            ]
            if unused:
                raise SettingError(
                    unused[0],
                    f"{', '.join(unused)} have no effect while name is null: set name to tools or to "
                    "module:function",
                    given=getattr(self, unused[0]),
                    allowed="its default, or name tools or module:function",
                    nearest=type(self).model_fields[unused[0]].default,
                )
        return self
